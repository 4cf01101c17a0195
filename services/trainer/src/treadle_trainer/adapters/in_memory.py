"""Experience and Refit that live in this process: a run whose batches are there from the start."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from treadle_core.errors import Kind, TreadleError
from treadle_core.faults import Fault, FaultReason
from treadle_trainer.core.claims import Claim, ClaimedEpisode, ClaimedTask, ComingStep
from treadle_trainer.ports import (
    TRAINER_FENCED,
    VERSION_ENDED,
    Checkpoint,
    NewVersion,
    OpenedVersion,
    RunView,
    SentVersion,
)
from treadle_weights.transport import Arena, WeightTransport

_RETAINED = 2
"""Checkpoints that stay restorable."""


class FencedError(TreadleError):
    """A newer trainer acquired the run."""

    kind = Kind.PRECONDITION
    reason = TRAINER_FENCED


class VersionEndedError(TreadleError):
    """The version is not the one in flight."""

    kind = Kind.PRECONDITION
    reason = VERSION_ENDED


class RefusedError(TreadleError):
    """The call does not fit the state of the run."""

    kind = Kind.PRECONDITION
    reason = "STEP_OUT_OF_ORDER"


class MemoryExperience:
    """Experience that forgets everything when the process ends."""

    def __init__(self, batches: Sequence[tuple[ClaimedTask, ...]]) -> None:
        self.batches = list(batches)
        """Those of the steps from 1; an empty one never gets ready."""
        self.again: Callable[[ClaimedEpisode], ClaimedEpisode] = lambda episode: episode
        """Plays the next attempt of an episode whose payload is lost."""
        self._holder = ""
        self.trainer_epoch = 0
        self.trained_step = 0
        self.lineage: list[Checkpoint] = []
        """Committed checkpoints, oldest first."""
        self.reports: list[tuple[int, Mapping[str, float], str]] = []
        """Step, metrics and trace id, as they came."""
        self.faults: list[tuple[int, Fault]] = []
        """Step and what was wrong with its batch, as it came."""
        self.checkpoint_now = False
        """What a report is answered."""
        self.complete = asyncio.Event()
        """Set where final evaluation is done."""

    async def get_run(self, *, after: int, wait_s: float) -> RunView:
        if after and not self.complete.is_set():
            await _wait(self.complete, wait_s)
        retained = tuple(reversed(self.lineage[-_RETAINED:]))
        return RunView(after + 1, retained, self.complete.is_set())

    async def acquire(self, *, holder: str, checkpoint_digest: str) -> int:
        digests = ["", *(checkpoint.digest for checkpoint in self.lineage)]
        if checkpoint_digest not in digests or (self.lineage and not checkpoint_digest):
            raise RefusedError("no such checkpoint", field="checkpoint_digest")
        if holder != self._holder:
            self._holder = holder
            self.trainer_epoch += 1
        del self.lineage[digests.index(checkpoint_digest) :]
        self.trained_step = self.lineage[-1].step if self.lineage else 0
        return self.trainer_epoch

    async def claim(self, *, trainer_epoch: int, step: int, wait_s: float) -> Claim:
        self._check_next(trainer_epoch, step)
        if step > len(self.batches):
            return Claim(complete=True)
        if not self.batches[step - 1]:
            await asyncio.sleep(wait_s)
        return Claim(self.batches[step - 1], last=step == len(self.batches))

    async def preview(self, *, max_steps: int) -> Sequence[ComingStep]:
        coming = self.batches[self.trained_step :][: 1 + max_steps]
        return [ComingStep(Claim(batch), ready=bool(batch)) for batch in coming]

    async def hand_back(self, *, trainer_epoch: int, step: int, faults: Sequence[Fault]) -> None:
        self._check_next(trainer_epoch, step)
        self.faults += [(step, fault) for fault in faults]
        reasons = {(fault.episode_id, fault.attempt): fault.reason for fault in faults}
        batch = tuple(
            replace(task, episodes=tuple(self._formed_anew(e, reasons) for e in task.episodes))
            for task in self.batches[step - 1]
            if not any(
                reasons.get((e.episode_id, e.attempt)) is FaultReason.QUARANTINED
                for e in task.episodes
            )
        )
        # All batches are recorded: none is filled up, and one that is empty is no step.
        self.batches[step - 1 : step] = [batch] if batch else []

    def _formed_anew(
        self, episode: ClaimedEpisode, reasons: Mapping[tuple[str, int], FaultReason]
    ) -> ClaimedEpisode:
        if (episode.episode_id, episode.attempt) not in reasons:
            return episode
        return replace(self.again(episode), attempt=episode.attempt + 1)

    async def report(
        self, *, trainer_epoch: int, step: int, metrics: Mapping[str, float], trace_id: str
    ) -> bool:
        self._check(trainer_epoch)
        if step not in (self.trained_step, self.trained_step + 1):
            raise RefusedError("step", field="step", limit=self.trained_step + 1, value=step)
        self.trained_step = step
        self.reports.append((step, metrics, trace_id))
        return self.checkpoint_now

    async def commit(self, *, trainer_epoch: int, checkpoint: Checkpoint) -> Sequence[Checkpoint]:
        self._check(trainer_epoch)
        if checkpoint not in self.lineage:
            parent = self.lineage[-1].digest if self.lineage else ""
            if checkpoint.parent_digest != parent or checkpoint.step > self.trained_step:
                raise RefusedError("checkpoint", field="parent_digest", limit=parent)
            self.lineage.append(checkpoint)
        return self.lineage[: -_RETAINED - 1 : -1]

    def _check_next(self, trainer_epoch: int, step: int) -> None:
        self._check(trainer_epoch)
        if step != self.trained_step + 1:
            raise RefusedError("step", field="step", limit=self.trained_step + 1, value=step)

    def _check(self, trainer_epoch: int) -> None:
        if trainer_epoch != self.trainer_epoch:
            raise FencedError(
                "a newer trainer holds the run",
                field="trainer_epoch",
                limit=self.trainer_epoch,
                value=trainer_epoch,
            )


class MemoryRefit:
    """Refit without engines: every version commits at once."""

    def __init__(self, experience: MemoryExperience, transport: WeightTransport) -> None:
        self._experience = experience
        self._transport = transport
        self._opened: dict[str, int] = {}
        self._steps: dict[int, int] = {}
        self._arenas: dict[int, Arena] = {}
        self._in_flight = 0
        self.aliases: list[tuple[int, int]] = []
        """Version and base of those that were published without bytes."""
        self.committed: list[tuple[int, int, Mapping[str, int]]] = []
        """Version, step and digests of what was published, in order."""
        self.wanted = asyncio.Event()
        """Set where an engine needs parameters; cleared by the next version."""

    async def open_version(self, new: NewVersion) -> OpenedVersion:
        self._check(new.trainer_epoch)
        version = self._opened.setdefault(new.request_id, len(self._opened) + 1)
        self._steps[version] = new.step
        self._in_flight = version
        base = new.alias_of
        if base and self.committed and self.committed[-1][0] == base:
            self._arenas[version] = self._arenas[base]
            self.aliases.append((version, base))
            return OpenedVersion(version, self._arenas[version], aliased=True)
        self._arenas[version] = self._transport.arena("memory", version, new.layout.size())
        return OpenedVersion(version, self._arenas[version])

    async def send_version(
        self, *, trainer_epoch: int, version: int, digests: Mapping[str, int]
    ) -> SentVersion:
        self._check(trainer_epoch)
        if version != self._in_flight:
            raise VersionEndedError("version", field="version", value=version)
        if not self.committed or self.committed[-1][0] != version:
            self.committed.append((version, self._steps[version], digests))
        self.wanted.clear()
        return SentVersion(members=0, left_behind=0)

    async def await_demand(self, *, published_version: int, wait_s: float) -> bool:
        await _wait(self.wanted, wait_s)
        return self.wanted.is_set()

    def _check(self, trainer_epoch: int) -> None:
        if trainer_epoch != self._experience.trainer_epoch:
            raise FencedError("a newer trainer holds the run", field="trainer_epoch")


async def _wait(event: asyncio.Event, wait_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), wait_s)
