"""The control flow of a trainer: acquire, restore, then claim, train, report, publish, commit."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from treadle_core.faults import FaultReason
from treadle_runtime.failpoints import failpoint
from treadle_trainer import checkpoints, training
from treadle_trainer.core.claims import Claim
from treadle_trainer.core.metrics import step_metrics
from treadle_trainer.core.status import Phase, TrainerStatus
from treadle_trainer.core.step import StepResult
from treadle_trainer.ports import Backend, Checkpoint, CheckpointStoreFullError
from treadle_trainer.publisher import Published, Publisher, parameters_digest
from treadle_trainer.recipe import Recipe, Surroundings
from treadle_trainer.tracing import step_trace
from treadle_trainer.training import BatchFaultyError, StepFailedError
from treadle_trainer.waiting import Alarm, cancel

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_WAIT_S = 20.0
"""How long a peer may hold a call that waits for news."""

MOST_HAND_BACKS = 8
"""Batches of one step that are handed back before the trainer gives up."""
_ROOM_S = 2.0
"""How often a full disk is tried again, where the trainer cannot go on without a checkpoint."""


class Trainer:
    """Trains one run, as its only trainer, until there is nothing left to train.

    Control flow lives in the event loop; all that computes or blocks, in one worker thread.
    """

    def __init__(self, recipe: Recipe, surroundings: Surroundings) -> None:
        self._recipe = recipe
        self._with = surroundings
        self._worker = ThreadPoolExecutor(1, "compute")
        self._publisher = Publisher(surroundings.refit, surroundings.sender, self._compute)
        self._alarm = Alarm(recipe.no_progress_s, surroundings.tracker)
        self._draining = asyncio.Event()
        self._finished = asyncio.Event()
        self._phase = Phase.STARTING
        self._started = surroundings.clock()
        self._waiting_since: float | None = None
        self._waited_s = 0.0
        self._commit_s = 0.0
        self._epoch = 0
        self._step = 0
        self._hand_backs = 0
        self._unchanged = False
        self._head: Checkpoint | None = None
        self._backend: Backend | None = None
        self._published_step = -1

    async def run(self) -> None:
        """Trains until the run is complete, or until told to drain.

        Raises TreadleError: TRAINER_FENCED when another trainer took over, NO_VALID_CHECKPOINT,
        STEP_FAILED, or what a peer or a port answered. Nothing is committed or published then.
        """
        try:
            await self._start()
            await self._train()
            await self._stand_by()
            await self._compute(self._with.followers.end)
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
            await self._lead(self._recipe.start, optimizer=False)
        digest = self._head.digest if self._head else ""
        failpoint("trainer.start.before_acquire")
        self._epoch = await self._with.experience.acquire(
            holder=self._recipe.holder, checkpoint_digest=digest
        )
        failpoint("trainer.start.after_acquire")
        for name in await self._compute(self._with.store.remove_leftovers):
            log.warning("removed %s, which a crash left behind", name)
        if self._head is not None:
            await self._mark_latest(self._head)
        log.info("holding the run under epoch %d, from step %d", self._epoch, self._step)
        if self._head is None:
            await self._commit_when_there_is_room()
        await self._unless_draining(self._publish(""))

    async def _restore(self, found: tuple[Checkpoint, ...]) -> None:
        recipe = self._recipe

        def load(checkpoint: Checkpoint, folder: Path) -> tuple[Checkpoint, Path, Backend]:
            backend = recipe.build_backend(folder)
            checkpoints.restore(
                checkpoint, folder, backend, run_id=recipe.run_id, schedule=recipe.schedule
            )
            return checkpoint, folder, backend

        self._head, folder, self._backend = await self._compute(
            checkpoints.newest_valid, self._with.store, found, load
        )
        self._step = self._head.step
        await self._lead(folder, optimizer=True)

    async def _lead(self, folder: Path, *, optimizer: bool) -> None:
        """Has the followers hold what this rank has loaded."""
        backend = self._loaded
        await self._compute(
            self._with.followers.load,
            folder,
            optimizer=optimizer,
            digest=lambda: parameters_digest(backend.parameters()),
        )

    async def _train(self) -> None:
        """Takes steps until there are no more, and leaves none outside a checkpoint."""
        while True:
            waited_s = self._waited_s
            claim = await self._unless_draining(self._claim())
            if claim is None or claim.complete:
                break
            try:
                await self._take_step(claim, self._waited_s - waited_s)
            except BatchFaultyError as error:
                await self._hand_back(error)
        if self._head is None or self._head.step < self._step:
            await self._commit_when_there_is_room()
        if claim is not None and self._published_step < self._step:
            # The tasks ended after a step that nobody knew to be the last.
            await self._unless_draining(self._publish("", same=self._unchanged))

    async def _claim(self) -> Claim:
        """Waits for the next batch, answering the demand of engines meanwhile."""
        self._phase = Phase.CLAIMING
        self._waiting_since = self._with.clock()
        try:
            return await self._alarm.over(
                self._answering_demand(self._claim_when_ready()), "a batch", step=self._step
            )
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
            failpoint("trainer.step.after_claim")
            result, fetch_s = await self._compute(self._train_together, claim, step)
            self._unchanged = self._unchanged and not result.num_trained
            if result.num_media:
                log.warning("step %d: %d segments show media: untrained", step, result.num_media)
            metrics = step_metrics(claim, result, step=step) | {
                "wait_s": wait_s,
                "fetch_s": fetch_s,
                "train_s": clock() - began,
            }
            failpoint("trainer.step.before_report")
            wanted = await self._with.experience.report(
                trainer_epoch=self._epoch, step=step, metrics=metrics, trace_id=trace.trace_id
            )
            failpoint("trainer.step.after_report")
            self._step, self._hand_backs = step, 0
            publishing = clock()
            published = await self._publish_if_due(trace.trace_id, last=claim.last)
            digests = {"members_digest": claim.members_digest}
            if published is not None:
                trace.published(published.version)
                metrics["version"] = published.version
                digests["weights_digest"] = published.weights_digest
            metrics["publish_s"] = clock() - publishing
            step_s = wait_s + self._commit_s + clock() - began
            metrics["tokens_per_s"] = metrics["tokens"] / step_s
            # Before its checkpoint: a step that will not be trained again has its row.
            self._with.tracker.log("step", {"step": step, **metrics, **digests})
            committing = clock()
            await self._commit_if_due(wanted=wanted or claim.last)
            self._commit_s = clock() - committing

    def _train_together(self, claim: Claim, step: int) -> tuple[StepResult, float]:
        """Trains with the followers; returns what came of it, and seconds that reading took."""
        recipe, backend, followers = self._recipe, self._loaded, self._with.followers
        followers.train(step, claim)
        began, ranks = self._with.clock(), followers.ranks
        groups = training.read_groups(
            claim, recipe=recipe, backend=backend, payloads=self._with.payloads, ranks=ranks
        )
        fetch_s = self._with.clock() - began
        result = training.train_groups(
            claim, groups, step=step, recipe=recipe, backend=backend, ranks=ranks
        )
        return result, fetch_s

    async def _hand_back(self, error: BatchFaultyError) -> None:
        """Gives the batch of the next step back, for what is wrong with it."""
        step = self._step + 1
        self._hand_backs += 1
        log.error("step %d, batch %d: %s", step, self._hand_backs, error.message)
        if self._hand_backs > MOST_HAND_BACKS:
            raise StepFailedError(
                f"step {step}: {self._hand_backs} batches, and the last one too: {error.message}",
                field="episodes",
                limit=f"a fit batch after {MOST_HAND_BACKS} were handed back",
                value=self._hand_backs,
            )
        await self._with.experience.hand_back(
            trainer_epoch=self._epoch, step=step, faults=error.faults
        )
        lost = sum(fault.reason is FaultReason.PAYLOAD_LOST for fault in error.faults)
        row = {"step": step, "lost": lost, "quarantined": len(error.faults) - lost}
        self._with.tracker.log("handed_back", row)

    async def _commit_if_due(self, *, wanted: bool) -> None:
        """Commits a checkpoint when one is due; a full disk puts it off to the next step."""
        head = self._head.step if self._head else 0
        due = self._step - head >= self._recipe.checkpoint_every
        if due or wanted or self._draining.is_set():
            await self._has_committed()

    async def _commit_when_there_is_room(self) -> None:
        """Commits; gives up on a full disk only when draining: the steps are then trained again."""
        while not await self._has_committed():
            if await self._unless_draining(asyncio.sleep(_ROOM_S, result=True)) is None:
                return

    async def _has_committed(self) -> bool:
        """Commits; False, with a line in the log, where the disk is full."""
        try:
            await self._commit()
        except CheckpointStoreFullError as error:
            log.error("no checkpoint at step %d: %s", self._step, error.message)  # noqa: TRY400
            return False
        return True

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
        failpoint("trainer.checkpoint.before_commit")
        retained = await self._with.experience.commit(
            trainer_epoch=self._epoch, checkpoint=checkpoint
        )
        failpoint("trainer.checkpoint.after_commit")
        self._head = checkpoint
        await self._mark_latest(checkpoint)
        failpoint("trainer.checkpoint.after_latest")
        await self._compute(store.retain, retained)

    async def _mark_latest(self, checkpoint: Checkpoint) -> None:
        """Mends the hint for people, whatever it says; a full disk leaves it old."""
        try:
            await self._compute(self._with.store.mark_latest, checkpoint)
        except CheckpointStoreFullError as error:
            log.warning("the hint is old: %s", error.message)

    async def _publish_if_due(self, trace_id: str, *, last: bool) -> Published | None:
        """Publishes every so many steps, and the last one."""
        if self._step % self._recipe.publish_every and not last:
            return None
        return await self._unless_draining(self._publish(trace_id, same=self._unchanged))

    async def _publish(self, trace_id: str, *, same: bool = False) -> Published:
        """Publishes the present parameters; `same`: they are those of the newest version."""
        self._phase = Phase.PUBLISHING
        published = await self._publisher.publish(
            self._loaded.parameters(),
            trainer_epoch=self._epoch,
            step=self._step,
            trace_id=trace_id,
            same=same,
        )
        self._unchanged = True
        self._published_step = self._step
        return published

    async def _stand_by(self) -> None:
        """Keeps engines servable until the ledger says that all is done."""
        self._phase = Phase.COMPLETE
        done = self._answering_demand(self._until_complete())
        await self._unless_draining(self._alarm.over(done, "the end", step=self._step))

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
            await cancel(waiter, demand)

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
            await cancel(worker, draining)

    async def _compute(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `work` in the worker thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, lambda: work(*args, **kwargs))

    @property
    def _loaded(self) -> Backend:
        if self._backend is None:
            raise RuntimeError("the trainer has not started")
        return self._backend
