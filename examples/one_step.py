"""One RL step in one process, with the functions that the four services are made of.

`python examples/one_step.py` takes a few seconds. `main` is the order of things; each function
after it is what one service does, and uses that service's own core. What is left out is what
makes four processes of it: the wire, clocks, disks and waiting.
"""

import asyncio
import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from calculator.env import CalculatorEnv
from calculator.tasks import CalculatorTasks
from numpy.typing import NDArray
from tokenizers import Tokenizer

from treadle_agents.images.placeholders import Shown
from treadle_agents.loop import Limits, Words, run_episode
from treadle_agents.record import Generated
from treadle_core.episodes import Episode, Group
from treadle_core.tickets import Sampling, Ticket
from treadle_experience.core import checkpoints, results, steps, tickets, versions
from treadle_experience.core.rules import Rules
from treadle_experience.core.run import TRAINING, Run
from treadle_experience.core.state import Attempt, Result
from treadle_payloads.codec import decode_payload, encode_payload
from treadle_refit.core.fleet import Fleet, Report
from treadle_refit.core.orders import Install, Load, next_order, pending
from treadle_refit.core.publication import Publication, Versions
from treadle_rollout.adapters.transformers_engine.engine import TransformersEngine
from treadle_rollout.core.results import versions_of
from treadle_rollout.ports import Engine, GenerationRequest
from treadle_trainer.adapters.single import SingleBackend
from treadle_trainer.core.advantages.grpo import Grpo
from treadle_trainer.core.losses.ppo_clip import PpoClip
from treadle_trainer.core.step import StepResult, StepSettings, train_step
from treadle_trainer.ports import Backend
from treadle_weights.digests import layout_digests, weights_digest
from treadle_weights.layouts import Layout, whole
from treadle_weights.plan import box_of, execute, plan
from treadle_weights.transport import Arena

POLICY = Path(__file__).parent / "calculator" / "policy"
TASKS_PER_STEP, GROUP_SIZE = 4, 8
RULES = Rules(
    run_id="one-step",
    steps=1,
    tasks_per_step=TASKS_PER_STEP,
    group_size=GROUP_SIZE,
    max_lag=0,  # strictly on-policy: no task is opened that this step will not take
    retries=0,
    deadline_s=60.0,
    lease_s=10.0,
    sampling=Sampling(temperature=1.0, max_tokens=14),
)


async def main() -> StepResult:
    """Takes the step, and says what happened on the way."""
    run = Run(RULES, {TRAINING: CalculatorTasks("train").read})
    run.load([])  # an empty journal: a new run
    backend = SingleBackend(POLICY)
    engine = TransformersEngine(POLICY, max_context=128, slots=TASKS_PER_STEP * GROUP_SIZE)
    epoch, _ = checkpoints.acquire(run, holder="this process", checkpoint_digest="")
    refit = Versions()
    try:
        # The start parameters are a version like any other: none is generated with before.
        version = await publish(run, refit, backend, engine, trainer_epoch=epoch, step=0)
        print(f"version {version}: the start parameters")

        issued = lease(run, engine)
        print(f"leased {len(issued)} tickets of {len(run.state.window)} tasks")
        words = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
        await asyncio.gather(*(play(run, engine, words, ticket) for ticket in issued))

        groups = claim(run, trainer_epoch=epoch)
        print("rewards", [[episode.reward for episode in group.episodes] for group in groups])
        result = train(run, backend, groups, trainer_epoch=epoch)
        print(f"loss {result.loss:.4f} over {result.num_trained} tokens", end=", ")
        print(f"{result.num_silent} groups said nothing, gradient norm {result.grad_norm:.3f}")

        version = await publish(run, refit, backend, engine, trainer_epoch=epoch, step=1)
        print(f"version {version}: the parameters of step 1; the engine serves them")
    finally:
        await engine.close()
    return result


def lease(run: Run, engine: Engine) -> list[Ticket]:
    """experience: opens as many tasks as may be ahead of the served version, and issues tickets.

    Lag is bounded here, before a token is sampled: see treadle_experience.core.admission.
    """
    slots = TASKS_PER_STEP * GROUP_SIZE
    return tickets.lease(
        run,
        replica_id="replica",
        served_version=engine.served_version,
        max_tickets=2 * slots,
        slots=slots,
    )


async def play(run: Run, engine: Engine, words: Tokenizer, ticket: Ticket) -> None:
    """rollout: plays one ticket. Token ids in, token ids out; nothing is tokenised twice."""
    episode = await run_episode(
        CalculatorEnv(),
        ticket.spec,
        generate=partial(generate, engine, ticket.episode_id),
        words=Words(
            encode=lambda text: words.encode(text, add_special_tokens=False).ids,
            decode=lambda ids: words.decode(ids, skip_special_tokens=False),
        ),
        sampling=ticket.sampling,
        limits=Limits(max_context=engine.max_context, max_turns=8),
    )
    engine.release(ticket.episode_id)
    complete(run, ticket, episode)


async def generate(engine: Engine, session: str, prompt: Shown, sampling: Sampling) -> Generated:
    """rollout: one turn, with what the trainer needs to know of how it was sampled."""
    return await engine.generate(GenerationRequest(session, prompt.token_ids, sampling))


def complete(run: Run, ticket: Ticket, episode: Episode) -> None:
    """experience: records the result, unless the ticket's attempt has been fenced."""
    payload = encode_payload(episode.segments)
    result = Result(
        reward=episode.reward,
        termination=episode.termination,
        metrics=episode.metrics,
        turn_rewards=episode.turn_rewards,
        num_tokens=sum(segment.num_tokens for segment in episode.segments),
        num_trained=sum(segment.num_trained for segment in episode.segments),
        versions=versions_of(episode.segments),
        traceparent="",
        sha256=hashlib.sha256(payload).hexdigest(),
        size=len(payload),
        inlined=True,
    )
    attempt = Attempt(ticket.episode_id, ticket.attempt)
    results.complete(run, replica_id="replica", attempt=attempt, result=result, inline=payload)


def claim(run: Run, *, trainer_epoch: int) -> list[Group]:
    """Experience gives the batch of step 1, the oldest tasks first; the trainer decodes it."""
    claimed = steps.claim(run, trainer_epoch=trainer_epoch, step=1)
    return [
        Group(
            task.task_id,
            tuple(
                Episode(
                    segments=decode_payload(member.inline or b""),
                    reward=member.result.reward,
                    termination=member.result.termination,
                )
                for member, _ in task.episodes
                if member.result is not None
            ),
        )
        for task in claimed.tasks
    ]


def train(run: Run, backend: Backend, groups: list[Group], *, trainer_epoch: int) -> StepResult:
    """trainer: advantages, packing, loss, one optimiser update; then experience is told.

    `train_step` is the heart of the trainer, and the next thing to read.
    """
    result = train_step(
        backend,
        groups,
        advantage=Grpo(),
        loss=PpoClip(clip_low=0.2, clip_high=0.2),
        settings=StepSettings(microbatch_tokens=1024, max_grad_norm=1.0),
        learning_rate=4e-4,
    )
    metrics = {"loss": result.loss, "grad_norm": result.grad_norm}
    steps.report(run, trainer_epoch=trainer_epoch, step=1, metrics=metrics, trace_id="")
    return result


async def publish(
    run: Run,
    refit: Versions,
    backend: Backend,
    engine: TransformersEngine,
    *,
    trainer_epoch: int,
    step: int,
) -> int:
    """refit: brings the trainer's parameters into the engine as a version, in two phases."""
    sent, arena = announce(run, refit, backend, trainer_epoch=trainer_epoch, step=step)

    # Phase one: the engine takes the bytes beside what it serves, and verifies them.
    fleet = Fleet(dead_after_s=math.inf)
    report = Report("engine", engine.layout, serving=engine.served_version)
    order = next_order(refit, report)
    assert isinstance(order, Load)  # noqa: S101, what refit's core promises
    copies = plan(sent.layout, engine.layout)
    execute(copies, sent.layout, engine.layout, arena, engine.arrival)
    if layout_digests(engine.layout, engine.arrival) != sent.digests:
        raise ValueError(f"version {sent.version} arrived damaged")
    report = replace(report, verified=sent.version)
    fleet.hear(report, now=0.0)

    # The ledger commits it as soon as no member is waited for; none may install it before.
    assert not pending(refit, fleet, now=0.0)  # noqa: S101
    digest = weights_digest(sent.digests)
    versions.commit(run, trainer_epoch=trainer_epoch, number=sent.version, weights_digest=digest)
    refit.commit(sent)

    # Phase two: the engine installs between two tokens.
    order = next_order(refit, report)
    assert isinstance(order, Install)  # noqa: S101
    await engine.install(order.version)
    return order.version


def announce(
    run: Run, refit: Versions, backend: Backend, *, trainer_epoch: int, step: int
) -> tuple[Publication, NDArray[np.uint8]]:
    """Gets a number from the ledger, and lays the bytes out where an engine can take them."""
    name = f"step-{step}"
    number = versions.announce(
        run, trainer_epoch=trainer_epoch, step=step, request_id=name, trace_id=""
    )
    parameters = backend.parameters()
    layout = whole({key: ("float32", tuple(value.shape)) for key, value in parameters.items()})
    opened = Publication(
        version=number,
        step=step,
        trainer_epoch=trainer_epoch,
        request_id=name,
        trace_id="",
        layout=layout,
        arena=Arena(path="", size=layout.size()),
        opened_at=0.0,
    )
    refit.begin(opened)
    arena = bytes_of(layout, parameters)
    digests = layout_digests(layout, arena)
    return refit.send(number, trainer_epoch, digests, commit_at=math.inf), arena


def bytes_of(layout: Layout, parameters: Mapping[str, torch.Tensor]) -> NDArray[np.uint8]:
    """All parameters in one buffer, each where the layout says."""
    buffer = np.zeros(layout.size(), np.uint8)
    for rectangle in layout.rectangles:
        box = box_of(buffer, rectangle)
        box[...] = parameters[rectangle.tensor].numpy().view(box.dtype)
    return buffer


if __name__ == "__main__":
    asyncio.run(main())
