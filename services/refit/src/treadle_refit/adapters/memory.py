"""VersionLedger that forgets everything when the process ends: refit without an experience."""

from dataclasses import dataclass, field, replace

from treadle_core.versions import Version, VersionState
from treadle_refit.core.errors import (
    TrainerFencedError,
    VersionEndedError,
    VersionNotFoundError,
)
from treadle_refit.ports import Committed


@dataclass(slots=True)
class MemoryLedger:
    """Versions in memory, under the rules of the experience service."""

    trainer_epoch: int = 1
    """Epoch of the trainer that holds the run; an older one is fenced."""
    versions: dict[int, Version] = field(default_factory=dict[int, Version])
    _requests: dict[str, int] = field(default_factory=dict[str, int], init=False)

    async def newest_committed(self) -> Committed:
        version = self._newest()
        return Committed(version, self.versions[version].weights_digest if version else "")

    async def announce(
        self, *, trainer_epoch: int, step: int, request_id: str, trace_id: str
    ) -> int:
        self._check(trainer_epoch)
        if request_id not in self._requests:
            number = len(self.versions) + 1
            self.versions[number] = Version(
                number=number,
                step=step,
                trainer_epoch=trainer_epoch,
                parent=self._newest(),
                trace_id=trace_id,
            )
            self._requests[request_id] = number
        return self._requests[request_id]

    async def commit(self, *, trainer_epoch: int, version: int, weights_digest: str) -> None:
        self._check(trainer_epoch)
        known = self._find(version)
        if known.state is VersionState.COMMITTED:
            return
        if known.state is VersionState.ABORTED or version < self._newest():
            raise _ended(known)
        self.versions[version] = replace(
            known, state=VersionState.COMMITTED, weights_digest=weights_digest
        )

    async def abort(self, *, version: int, message: str) -> None:
        known = self._find(version)
        if known.state is VersionState.COMMITTED:
            raise _ended(known)
        self.versions[version] = replace(known, state=VersionState.ABORTED)

    def _newest(self) -> int:
        committed = (v.number for v in self.versions.values() if v.state is VersionState.COMMITTED)
        return max(committed, default=0)

    def _check(self, trainer_epoch: int) -> None:
        if trainer_epoch < self.trainer_epoch:
            raise TrainerFencedError(
                f"trainer epoch {trainer_epoch} is fenced by {self.trainer_epoch}",
                field="trainer_epoch",
                limit=self.trainer_epoch,
                value=trainer_epoch,
            )

    def _find(self, version: int) -> Version:
        if version not in self.versions:
            raise VersionNotFoundError(
                f"version {version} was never announced", field="version", value=version
            )
        return self.versions[version]


def _ended(version: Version) -> VersionEndedError:
    return VersionEndedError(
        f"version {version.number} is {version.state.value} or older than a committed one",
        field="version",
        value=version.number,
    )
