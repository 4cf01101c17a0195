"""Runs the rollout service: `python -m treadle_rollout.main --config FILE`."""

import asyncio
import os
import time
import uuid
from collections.abc import Callable
from functools import partial

from treadle.rollout.v1.rollout_service_pb2_grpc import add_RolloutServiceServicer_to_server
from treadle_payloads.stores import open_store
from treadle_rollout.adapters.grpc_experience import GrpcExperience
from treadle_rollout.adapters.grpc_refit import GrpcRefit
from treadle_rollout.attempts import AttemptRunner, AttemptSettings
from treadle_rollout.config import RolloutConfig
from treadle_rollout.core.replica import ReplicaState
from treadle_rollout.fleet import Fleet
from treadle_rollout.players import Player
from treadle_rollout.ports import Engine
from treadle_rollout.replica import Replica, ReplicaSettings
from treadle_rollout.servicer import RolloutServicer
from treadle_rollout.transcripts import Transcripts
from treadle_rollout.wiring import Cast, agents_of, cast_of
from treadle_rollout.words import words_of
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
    os.environ["TREADLE_RUN"] = cfg.run.id  # workers name it where they start something elsewhere
    pool = await agents_of(cfg)
    engine: Engine = plugins.build(
        "treadle.engines", cfg.engine, model=cfg.run.model, slots=cfg.slots, seed=cfg.run.seed
    )
    state = ReplicaState(cfg.slots, started_at=time.monotonic())
    try:
        cast = await cast_of(cfg, pool, engine, partial(_count_tokens, state))
        async with (
            connect(cfg.experience_address) as ledger,
            connect(cfg.refit_address) as fleet,
            doorbell.of_run(cfg.run, hears=[Topic.TICKETS, Topic.VERSIONS]) as bell,
        ):
            await _serve(
                cfg,
                replica_id,
                engine,
                cast,
                state,
                GrpcExperience(ledger, cfg.run.id, replica_id),
                GrpcRefit(fleet, cfg.run.id, replica_id, bell),
                bell,
            )
    finally:
        await engine.close()


async def _serve(
    cfg: RolloutConfig,
    replica_id: str,
    engine: Engine,
    cast: Cast,
    state: ReplicaState,
    experience: GrpcExperience,
    refit: GrpcRefit,
    bell: Doorbell,
) -> None:
    leaving, done = asyncio.Event(), asyncio.Event()
    tracker = of_service(cfg.run, "rollout")
    transcripts = Transcripts(words_of(str(cfg.run.model / "tokenizer.json")).decode, tracker)
    replica = _replica(cfg, engine, cast.player, experience, bell, state, transcripts)
    receiver = _transport(cfg).receiver()
    fleet = Fleet(engine, refit, receiver, leaving=leaving, done=done, tracker=tracker)

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            row = partial(_row, state, engine, cast, bell)
            beside = [group.create_task(_report(tracker, row))]
            beside += [group.create_task(each.run()) for each in cast.supervised]
            await replica.run()
            done.set()
            for task in beside:
                task.cancel()

    async def drain() -> None:
        leaving.set()
        if cast.sessions:
            cast.sessions.drain()
        await replica.drain()

    servicer = RolloutServicer(replica_id, state, engine, time.monotonic, cast.offers)
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


def _transport(cfg: RolloutConfig) -> WeightTransport:
    return plugins.build("treadle.weight_transports", cfg.transport, run_dir=cfg.run.dir)


def _replica(
    cfg: RolloutConfig,
    engine: Engine,
    player: Player,
    experience: GrpcExperience,
    bell: Doorbell,
    state: ReplicaState,
    transcripts: Transcripts,
) -> Replica:
    runner = AttemptRunner(
        AttemptSettings(cfg.run.id, inline_bytes=cfg.run.inline_bytes),
        experience,
        player,
        open_store(cfg.run),
        on_completed=transcripts.note,
        on_failed=transcripts.note_failure,
        on_counts=state.sessions.update,
    )
    return Replica(
        ReplicaSettings(cfg.slots, grace_s=cfg.grace_s),
        experience=experience,
        bell=bell,
        engine=engine,
        runner=runner,
        state=state,
    )


def _count_tokens(state: ReplicaState, tokens: int) -> None:
    state.sampled_tokens += tokens


def _row(state: ReplicaState, engine: Engine, cast: Cast, bell: Doorbell) -> dict[str, float]:
    row = state.row(engine.served_version, time.monotonic()) | bell.row() | cast.row()
    return row | {"non_finite": engine.non_finite}


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
