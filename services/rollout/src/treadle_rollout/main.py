"""Runs the rollout service: `python -m treadle_rollout.main --config FILE`."""

import asyncio
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

from treadle.rollout.v1.rollout_service_pb2_grpc import add_RolloutServiceServicer_to_server
from treadle_core.errors import InvalidFieldError
from treadle_payloads.stores import open_store
from treadle_rollout.adapters.grpc_experience import GrpcExperience
from treadle_rollout.adapters.grpc_refit import GrpcRefit
from treadle_rollout.adapters.worker_pool import WorkerPool
from treadle_rollout.adapters.worker_process import WorkerSettings, WorkerStartError
from treadle_rollout.attempts import AttemptRunner, AttemptSettings
from treadle_rollout.config import RolloutConfig
from treadle_rollout.core.replica import ReplicaState
from treadle_rollout.fleet import Fleet
from treadle_rollout.ports import Engine
from treadle_rollout.replica import Replica, ReplicaSettings
from treadle_rollout.servicer import RolloutServicer
from treadle_rollout.transcripts import Transcripts
from treadle_rollout.worker import words_of
from treadle_runtime import config, doorbell, plugins, server
from treadle_runtime.channel import connect
from treadle_runtime.doorbell import Doorbell, Topic
from treadle_runtime.tracker import Tracker, of_service
from treadle_weights.transport import WeightTransport

REPORT_S = 2.0
"""Seconds between rows of metrics."""


async def main(cfg: RolloutConfig) -> None:
    """Serves until the run is complete or the process is told to stop."""
    replica_id = f"rollout-{uuid.uuid4().hex[:12]}"
    pool = await _agents(cfg)
    engine: Engine = plugins.build(
        "treadle.engines", cfg.engine, model=cfg.run.model, slots=cfg.slots, seed=cfg.run.seed
    )
    try:
        async with (
            connect(cfg.experience_address) as ledger,
            connect(cfg.refit_address) as fleet,
            doorbell.of_run(cfg.run, hears=[Topic.TICKETS, Topic.VERSIONS]) as bell,
        ):
            await _serve(
                cfg,
                replica_id,
                engine,
                pool,
                GrpcExperience(ledger, cfg.run.id, replica_id),
                GrpcRefit(fleet, cfg.run.id, replica_id, bell),
                bell,
            )
    finally:
        await engine.close()


async def _agents(cfg: RolloutConfig) -> WorkerPool:
    """Agents that are ready to play. Raises PluginError where they cannot be."""
    tokenizer = _tokenizer(cfg)
    if not tokenizer.is_file():
        raise InvalidFieldError("run.model", limit="a folder with tokenizer.json", value=tokenizer)
    settings = WorkerSettings(
        tokenizer=tokenizer,
        agent=cfg.agent.name,
        parameters=cfg.agent.parameters,
        places=-(-cfg.slots // cfg.workers),
        log=cfg.run.dir / "logs" / "agents.log",
    )
    pool = WorkerPool(settings, cfg.workers)
    try:
        await pool.start()
    except WorkerStartError as error:
        raise plugins.PluginError(f"agent {cfg.agent.name!r}: {error}") from error
    return pool


async def _serve(
    cfg: RolloutConfig,
    replica_id: str,
    engine: Engine,
    pool: WorkerPool,
    experience: GrpcExperience,
    refit: GrpcRefit,
    bell: Doorbell,
) -> None:
    state = ReplicaState(cfg.slots, started_at=time.monotonic())
    leaving, done = asyncio.Event(), asyncio.Event()
    tracker = of_service(cfg.run, "rollout")
    transcripts = Transcripts(words_of(str(_tokenizer(cfg))).decode, tracker)
    replica = _replica(cfg, engine, pool, experience, bell, state, transcripts)
    receiver = _transport(cfg).receiver()
    fleet = Fleet(engine, refit, receiver, leaving=leaving, done=done, tracker=tracker)

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            row = partial(_row, state, engine, pool, bell)
            beside = [group.create_task(pool.run()), group.create_task(_report(tracker, row))]
            await replica.run()
            done.set()
            for task in beside:
                task.cancel()

    async def drain() -> None:
        leaving.set()
        await replica.drain()

    servicer = RolloutServicer(replica_id, state, engine, time.monotonic)
    await server.serve(
        server.Service(
            name="rollout",
            listen=cfg.listen,
            insecure_dev=cfg.run.insecure_dev,
            register=partial(add_RolloutServiceServicer_to_server, servicer),
            proto_services=("treadle.rollout.v1.RolloutService",),
            background=(work, fleet.run),
            drain=drain,
            grace_s=cfg.grace_s + 10.0,
        )
    )


def _tokenizer(cfg: RolloutConfig) -> Path:
    return cfg.run.model / "tokenizer.json"


def _transport(cfg: RolloutConfig) -> WeightTransport:
    return plugins.build("treadle.weight_transports", cfg.transport, run_dir=cfg.run.dir)


def _replica(
    cfg: RolloutConfig,
    engine: Engine,
    pool: WorkerPool,
    experience: GrpcExperience,
    bell: Doorbell,
    state: ReplicaState,
    transcripts: Transcripts,
) -> Replica:
    def count(tokens: int) -> None:
        state.sampled_tokens += tokens

    runner = AttemptRunner(
        AttemptSettings(
            cfg.run.id, cfg.max_turns, cfg.failure_reward, inline_bytes=cfg.run.inline_bytes
        ),
        experience,
        engine,
        pool,
        open_store(cfg.run),
        on_tokens=count,
        on_completed=transcripts.note,
        on_failed=transcripts.note_failure,
    )
    return Replica(
        ReplicaSettings(cfg.slots, grace_s=cfg.grace_s),
        experience=experience,
        bell=bell,
        engine=engine,
        agents=pool,
        runner=runner,
        state=state,
    )


def _row(state: ReplicaState, engine: Engine, pool: WorkerPool, bell: Doorbell) -> dict[str, float]:
    row = state.row(engine.served_version, time.monotonic()) | bell.row()
    return row | {"worker_restarts": pool.restarts, "non_finite": engine.non_finite}


async def _report(tracker: Tracker, row: Callable[[], dict[str, float]]) -> None:
    """Logs a row every REPORT_S, and the last one when cancelled."""
    before = row()
    try:
        while True:
            await asyncio.sleep(REPORT_S)
            before = _log(tracker, before, row())
    finally:
        _log(tracker, before, row())


def _log(tracker: Tracker, before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    tokens, seconds = (now[name] - before[name] for name in ("sampled_tokens", "up_s"))
    tracker.log("rollout", now | {"tokens_per_s": round(tokens / max(seconds, 1e-3), 1)})
    return now


if __name__ == "__main__":
    settings = config.load(RolloutConfig)
    server.run(settings, "rollout", partial(main, settings))
