"""A trainer as the ledger sees it, refit's part of a publication included."""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.duration_pb2 import Duration

from ledger_model.calls import World, happens
from ledger_model.oracle import require
from ledger_model.process import LostError
from treadle.experience.v1 import experience_service_pb2 as pb
from treadle_core.errors import TreadleError

REASONS = (pb.FAULT_REASON_PAYLOAD_LOST, pb.FAULT_REASON_QUARANTINED)
FENCED = "TRAINER_FENCED"


@dataclass
class Trainer:
    """Keeps the contract; whoever took over from it is not its business."""

    name: str
    world: World = field(repr=False)
    checkpoint_every: int
    publish_every: int
    epoch: int = 0
    """0 until it holds the run."""
    step: int = 0
    head: tuple[str, int] = ("", 0)
    """Digest and step of the checkpoint that its state follows."""
    claim: Any = None
    """The batch that it works on."""
    wanted: bool = False
    """The ledger asks for a checkpoint."""
    last: bool = False
    complete: bool = False
    restores: str = ""
    """What it decided to restore, until it holds the run."""
    chosen: bool = False
    fenced: bool = False
    busy: bool = False
    open_version: tuple[int, int] | None = None
    """Number and step of a version that is announced and not ended."""
    published: int = -1
    """Step of its last committed version."""
    requests: int = 0
    _request: tuple[str, int] | None = None
    _saved: tuple[str, int] | None = None
    _faults: list[Any] | None = None
    _reporting: bool = False

    async def act(self, *, older: bool = False) -> None:
        """Does its next thing; tries again what was lost."""
        try:
            await self._next(older=older)()
        except LostError:
            return
        except TreadleError as error:
            await self._refused(error)

    def _next(self, *, older: bool) -> Callable[[], Awaitable[None]]:
        if not self.epoch:
            return lambda: self._acquire(older=older)
        if not self.head[0]:
            return self._commit
        if self.open_version:
            return self._end_version
        ends = self.last or self.complete
        due = self.step - self.head[1] >= self.checkpoint_every or ends or self.wanted
        behind = self.step > self.head[1]
        if self._saved or (due and behind):
            return self._commit
        newest = self.step if ends else self.step - self.step % self.publish_every
        publishes = self.published < newest
        if (self._request or publishes) and (self.published < 0 or not self.world.chance(0.3)):
            return self._announce
        if self._faults is not None:
            return self._hand_back
        reads = self.claim is not None and not self._reporting
        if reads and (self._lost() or self.world.chance(0.12)):
            return self._hand_back
        if self.claim is not None:
            return self._report
        if behind and self.world.chance(0.15):
            return self._commit
        if self.world.chance(0.05):
            return self._announce
        return self._claim

    async def _refused(self, error: TreadleError) -> None:
        fenced = error.reason == FENCED
        ended = error.reason == "VERSION_ENDED"
        retaken = error.reason in ("UNKNOWN_CHECKPOINT", "CHECKPOINT_REQUIRED")
        if fenced:
            self.fenced = True
        elif ended and self.open_version:
            self.open_version = None
        elif retaken and not self.epoch:
            self.chosen = False
        else:
            require(False, "a trainer that keeps the contract is not refused", self, error)

    async def _call(self, method: str, **fields: Any) -> Any:
        newest = self.world.oracle.epoch
        answer = await self.world.call(self.name, method, trainer_epoch=self.epoch, **fields)
        self.world.oracle.accepted_from(self.epoch, newest, method)
        return answer

    async def _acquire(self, *, older: bool) -> None:
        if not self.chosen:
            run = await self.world.call(self.name, "GetRun")
            found = run.checkpoints[-1 if older else 0].digest if run.checkpoints else ""
            self.restores, self.chosen = found, True
        answer = await self.world.call(
            self.name, "AcquireRun", holder=self.name, checkpoint_digest=self.restores
        )
        self.world.oracle.acquired(answer.trainer_epoch)
        step = self.world.oracle.checkpoints[self.restores][1] if self.restores else 0
        require(answer.step == step, "a restore begins at its checkpoint", answer.step, step)
        self.epoch, self.step, self.head = answer.trainer_epoch, step, (self.restores, step)

    async def _claim(self) -> None:
        wait = Duration(seconds=5 if self.world.chance(0.2) else 0)
        answer = await self._call("ClaimStep", step=self.step + 1, wait=wait)
        if answer.tasks:
            self.world.oracle.claimed(self.step + 1, answer, self.world.process.state)
            self.claim = answer
        self.complete = answer.complete

    async def _report(self) -> None:
        self._reporting = True
        waited_s = self.world.random.choice((0.0, 0.0, 0.5))
        metrics = {"loss": 0.5, "wait_s": waited_s, "train_s": 1.0}
        answer = await self._call("ReportStep", step=self.step + 1, metrics=metrics)
        self.world.oracle.reported(self.epoch, self.step + 1, asked=answer.checkpoint_now)
        self.wanted = answer.checkpoint_now
        self.step += 1
        self.last, self.claim, self._reporting = self.claim.last, None, False

    async def _hand_back(self) -> None:
        """Finds fault with some of its batch, or with none of it."""
        if self._faults is None:
            found = self._find_faults()
            self.world.oracle.handed_back(self.step + 1, found)
            self._faults = [fault for _, fault in found]
        await self._call("HandBackStep", step=self.step + 1, faults=self._faults)
        self._faults, self.claim = None, None

    def _find_faults(self) -> list[tuple[str, Any]]:
        """Names what is gone, and at times members, or all of them, that are said to be bad."""
        random, members, lost = self.world.random, self._members(), self._lost()
        if self.world.chance(0.8):
            few = min(random.choice((0, 1, 1, 2)), len(members))
            chosen = {
                each: random.choice(REASONS) for each in random.sample(range(len(members)), few)
            }
        else:
            chosen = {} if self.world.fair else dict.fromkeys(range(len(members)), REASONS[1])
        chosen |= dict.fromkeys(lost, REASONS[0])
        return [(members[each][0], _fault(members[each][1], why)) for each, why in chosen.items()]

    def _members(self) -> list[tuple[str, Any]]:
        return [(task.task_id, e) for task in self.claim.tasks for e in task.episodes]

    def _lost(self) -> list[int]:
        """Places of the members whose payload is gone."""
        held = self.epoch == self.world.process.state.trainer_epoch
        is_gone = self.world.journal.is_gone
        members = enumerate(self._members())
        return [i for i, (_, e) in members if is_gone(e.result.payload, held=held)]

    async def _commit(self) -> None:
        """Saves its state; the same state from the same parent may give the same bytes again."""
        if self._saved is None:
            salt = self.name if happens(self.world.random, 0.5) else ""
            text = f"{self.head[0]}/{self.step}/{salt}"
            self._saved = (hashlib.sha256(text.encode()).hexdigest(), self.step)
        digest, step = self._saved
        oracle = self.world.oracle
        if self.world.chance(0.02):
            await self._forge_commit(step)
        oracle.checkpoints[digest] = (self.head[0], step)
        answer = await self._commit_on(self.head[0], digest, step)
        kept = [each.digest for each in answer.retained]
        require(
            kept == [each for each in (digest, self.head[0]) if each],
            "the newest two checkpoints can be restored",
            kept,
        )
        oracle.committed.add(digest)
        self.head, self._saved, self.wanted = self._saved, None, False

    async def _commit_on(self, parent: str, digest: str, step: int) -> Any:
        return await self._call(
            "CommitCheckpoint",
            digest=digest,
            parent_digest=parent,
            step=step,
            path=f"checkpoints/{digest[:8]}",
        )

    async def _forge_commit(self, step: int) -> None:
        """A checkpoint that does not follow the head."""
        forged = hashlib.sha256(f"{self.head}/forged".encode()).hexdigest()
        try:
            await self._commit_on("f" * 64, forged, step)
        except TreadleError as error:
            require(error.reason in (FENCED, "WRONG_PARENT"), "a lineage has no gap (I3)", error)
            return
        require(False, "a lineage has no gap (I3)", forged)

    async def _announce(self) -> None:
        if self._request is None:
            self.requests += 1
            self._request = (f"{self.name}-{self.requests}", self.step)
        request_id, step = self._request
        answer = await self._call("AnnounceVersion", step=step, request_id=request_id)
        known = self.world.oracle.announced.setdefault(answer.version, step)
        require(known == step, "a version number is never reused", answer.version)
        self._request, self.open_version = None, (answer.version, step)

    async def _end_version(self) -> None:
        assert self.open_version is not None
        number, step = self.open_version
        if self.world.chance(0.2):
            await self.world.call(self.name, "AbortVersion", version=number, message="no engine")
            self.open_version = None
            return
        self.world.oracle.commits.add(number)
        await self._call("CommitVersion", version=number, weights_digest=f"{number:016x}")
        self.world.oracle.published[number] = step
        self.open_version, self.published = None, max(self.published, step)


def _fault(episode: Any, reason: Any) -> Any:
    return pb.EpisodeFault(
        episode_id=episode.episode_id,
        attempt=episode.attempt,
        reason=reason,
        message="it is gone, or it is bad",
    )
