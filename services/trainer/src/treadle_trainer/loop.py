"""The control flow of a trainer: acquire, restore, then claim, train, report, commit, publish."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from treadle_core.episodes import Group
from treadle_core.errors import Kind, TreadleError
from treadle_runtime.tracker import Tracker
from treadle_trainer import checkpoints
from treadle_trainer.core.advantages import Advantage
from treadle_trainer.core.claims import Claim, checked_episode
from treadle_trainer.core.losses import Loss
from treadle_trainer.core.metrics import step_metrics
from treadle_trainer.core.schedule import Schedule
from treadle_trainer.core.status import Phase, TrainerStatus
from treadle_trainer.core.step import NonFiniteStepError, StepResult, StepSettings, train_step
from treadle_trainer.ports import (
    Backend,
    Checkpoint,
    CheckpointStore,
    CheckpointStoreFullError,
    Experience,
    PayloadReader,
    Refit,
)
from treadle_trainer.publisher import Publisher
from treadle_trainer.tracing import step_trace
from treadle_weights.transport import WeightSender

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_WAIT_S = 20.0
"""How long a peer may hold a call that waits for news."""


class StepFailedError(TreadleError):
    """A step could not be computed; the message names its episodes. Nothing was changed."""

    kind = Kind.BROKEN
    reason = "STEP_FAILED"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What and how the trainer trains."""

    run_id: str
    holder: str
    """Names the trainer for the life of its process."""
    start: Path
    """Hugging Face folder of the start parameters."""
    checkpoint_every: int
    """Steps between checkpoints."""
    advantage: Advantage
    loss: Loss
    schedule: Schedule
    settings: StepSettings
    build_backend: Callable[[Path], Backend]
    """From a Hugging Face folder."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the trainer works with."""

    experience: Experience
    refit: Refit
    sender: WeightSender
    payloads: PayloadReader
    store: CheckpointStore
    tracker: Tracker
    clock: Callable[[], float] = time.monotonic
    """Seconds."""


class Trainer:
    """Trains one run, as its only trainer, until there is nothing left to train.

    Control flow lives in the event loop; all that computes or blocks, in one worker thread.
    """

    def __init__(self, recipe: Recipe, surroundings: Surroundings) -> None:
        self._recipe = recipe
        self._with = surroundings
        self._worker = ThreadPoolExecutor(1, "compute")
        self._publisher = Publisher(surroundings.refit, surroundings.sender, self._compute)
        self._draining = asyncio.Event()
        self._finished = asyncio.Event()
        self._phase = Phase.STARTING
        self._started = surroundings.clock()
        self._waiting_since: float | None = None
        self._waited_s = 0.0
        self._epoch = 0
        self._step = 0
        self._head: Checkpoint | None = None
        self._backend: Backend | None = None

    async def run(self) -> None:
        """Trains until the run is complete, or until told to drain.

        Raises TreadleError: TRAINER_FENCED when another trainer took over, NO_VALID_CHECKPOINT,
        STEP_FAILED, or what a peer or a port answered. Nothing is committed or published then.
        """
        try:
            await self._start()
            await self._train()
            await self._stand_by()
        finally:
            self._finished.set()
            # In the worker, after what it may still do for a publication that was given up.
            self._worker.submit(self._with.sender.close)
            self._worker.shutdown(wait=False)

    async def drain(self) -> None:
        """Stops claiming; returns once the step in progress is reported and in a checkpoint."""
        self._draining.set()
        await self._finished.wait()

    def status(self) -> TrainerStatus:
        """What it does now."""
        now = self._with.clock()
        waiting_s = 0.0 if self._waiting_since is None else now - self._waiting_since
        return TrainerStatus(
            self._epoch,
            self._step,
            self._phase,
            waited_s=self._waited_s + waiting_s,
            up_s=now - self._started,
        )

    async def _start(self) -> None:
        """Restores what can be restored, acquires the run, and makes engines servable."""
        run = await self._with.experience.get_run(after=0, wait_s=0)
        if run.checkpoints:
            await self._restore(run.checkpoints)
        else:
            self._backend = await self._compute(self._recipe.build_backend, self._recipe.start)
        digest = self._head.digest if self._head else ""
        acquired = await self._with.experience.acquire(
            holder=self._recipe.holder, checkpoint_digest=digest
        )
        self._epoch = acquired.trainer_epoch
        for name in await self._compute(self._with.store.remove_leftovers):
            log.warning("removed %s, which a crash left behind", name)
        log.info("holding the run under epoch %d, from step %d", self._epoch, self._step)
        if self._head is None:
            await self._commit()
        await self._unless_draining(self._publish(""))

    async def _restore(self, found: tuple[Checkpoint, ...]) -> None:
        recipe = self._recipe
        restorable = await self._compute(checkpoints.newest_valid, self._with.store, found)
        self._backend = await self._compute(recipe.build_backend, restorable.folder)
        await self._compute(
            checkpoints.restore,
            restorable,
            self._backend,
            run_id=recipe.run_id,
            schedule=recipe.schedule,
        )
        self._head = restorable.checkpoint
        self._step = restorable.checkpoint.step

    async def _train(self) -> None:
        """Takes steps until there are no more, and leaves none outside a checkpoint."""
        while True:
            waited_s = self._waited_s
            claim = await self._unless_draining(self._claim())
            if claim is None or claim.complete:
                break
            await self._take_step(claim, self._waited_s - waited_s)
        if self._head is None or self._head.step < self._step:
            await self._commit()

    async def _claim(self) -> Claim:
        """Waits for the next batch, answering the demand of engines meanwhile."""
        self._phase = Phase.CLAIMING
        self._waiting_since = self._with.clock()
        try:
            return await self._answering_demand(self._claim_when_ready())
        finally:
            self._waited_s += self._with.clock() - self._waiting_since
            self._waiting_since = None

    async def _claim_when_ready(self) -> Claim:
        while True:
            claim = await self._with.experience.claim(
                trainer_epoch=self._epoch, step=self._step + 1, wait_s=_WAIT_S
            )
            if claim.tasks or claim.complete:
                return claim

    async def _take_step(self, claim: Claim, wait_s: float) -> None:
        """One step, from its batch to the version that engines serve."""
        clock, step = self._with.clock, self._step + 1
        with step_trace(self._recipe.run_id, step, claim.episodes) as trace:
            began = clock()
            self._phase = Phase.TRAINING
            result = await self._compute(self._compute_step, claim, step)
            metrics = step_metrics(claim, result, step=step) | {
                "wait_s": wait_s,
                "train_s": clock() - began,
            }
            await self._with.experience.report(
                trainer_epoch=self._epoch, step=step, metrics=metrics, trace_id=trace.trace_id
            )
            self._step = step
            await self._commit_if_due(last=claim.last)
            publishing = clock()
            version = await self._unless_draining(self._publish(trace.trace_id))
            if version is not None:
                trace.published(version)
                metrics["version"] = version
        metrics["publish_s"] = clock() - publishing
        metrics["tokens_per_s"] = metrics["tokens"] / (wait_s + clock() - began)
        self._with.tracker.log("step", {"step": step, **metrics})

    def _compute_step(self, claim: Claim, step: int) -> StepResult:
        """Fetches, checks and trains; in the worker thread."""
        recipe, backend = self._recipe, self._loaded
        groups = [
            Group(
                task.task_id,
                tuple(
                    checked_episode(
                        episode, self._with.payloads.read(episode), vocab_size=backend.vocab_size
                    )
                    for episode in task.episodes
                ),
            )
            for task in claim.tasks
        ]
        try:
            return train_step(
                backend,
                groups,
                advantage=recipe.advantage,
                loss=recipe.loss,
                settings=recipe.settings,
                learning_rate=recipe.schedule(step),
            )
        except NonFiniteStepError as error:
            names = ", ".join(f"{e.episode_id}/{e.attempt}" for e in claim.episodes)
            raise StepFailedError(
                f"step {step}: {error.message}; episodes {names}",
                field=error.field,
                limit=error.limit,
                value=error.value,
            ) from error

    async def _commit_if_due(self, *, last: bool) -> None:
        """Commits a checkpoint when one is due; a full disk puts it off to the next step."""
        head = self._head.step if self._head else 0
        due = self._step - head >= self._recipe.checkpoint_every
        if not (due or last or self._draining.is_set()):
            return
        try:
            await self._commit()
        except CheckpointStoreFullError as error:
            log.error("no checkpoint at step %d: %s", self._step, error.message)  # noqa: TRY400

    async def _commit(self) -> None:
        """Makes the present state the head of the lineage."""
        self._phase = Phase.CHECKPOINTING
        store = self._with.store
        checkpoint = await self._compute(
            checkpoints.write,
            store,
            self._loaded,
            run_id=self._recipe.run_id,
            step=self._step,
            parent_digest=self._head.digest if self._head else "",
            schedule=self._recipe.schedule,
        )
        retained = await self._with.experience.commit(
            trainer_epoch=self._epoch, checkpoint=checkpoint
        )
        self._head = checkpoint
        await self._compute(store.mark_latest, checkpoint)
        await self._compute(store.retain, retained)

    async def _publish(self, trace_id: str) -> int:
        self._phase = Phase.PUBLISHING
        return await self._publisher.publish(
            self._loaded.parameters(),
            trainer_epoch=self._epoch,
            step=self._step,
            trace_id=trace_id,
        )

    async def _stand_by(self) -> None:
        """Keeps engines servable until the ledger says that all is done."""
        self._phase = Phase.COMPLETE
        await self._unless_draining(self._answering_demand(self._until_complete()))

    async def _until_complete(self) -> None:
        position = 0
        while True:
            run = await self._with.experience.get_run(after=position, wait_s=_WAIT_S)
            if run.complete:
                return
            position = run.position

    async def _answering_demand(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Awaits `waiting`, publishing the present parameters whenever an engine wants them."""
        phase, waiter = self._phase, asyncio.ensure_future(waiting)
        demand = asyncio.ensure_future(self._demand())
        try:
            while True:
                await asyncio.wait({waiter, demand}, return_when=asyncio.FIRST_COMPLETED)
                if waiter.done():
                    return waiter.result()
                demand.result()
                log.info("an engine asks for parameters of step %d", self._step)
                await self._publish("")
                self._phase = phase
                demand = asyncio.ensure_future(self._demand())
        finally:
            await _cancel(waiter, demand)

    async def _demand(self) -> None:
        """Returns when an engine needs parameters that only this trainer has."""
        while not await self._with.refit.await_demand(
            published_version=self._publisher.version, wait_s=_WAIT_S
        ):
            pass

    async def _unless_draining(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Awaits `work`, or gives it up, with None, as soon as the trainer is told to drain."""
        worker = asyncio.ensure_future(work)
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait({worker, draining}, return_when=asyncio.FIRST_COMPLETED)
            return None if draining.done() and not worker.done() else worker.result()
        finally:
            await _cancel(worker, draining)

    async def _compute(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `work` in the worker thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, lambda: work(*args, **kwargs))

    @property
    def _loaded(self) -> Backend:
        if self._backend is None:
            raise RuntimeError("the trainer has not started")
        return self._backend


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels what still runs, and waits until it has ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
