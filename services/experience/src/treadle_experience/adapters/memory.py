"""Ledger `memory`: keeps the promises of the port until the process ends."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from treadle_core.errors import WrongRunError
from treadle_experience.core.errors import WriterFencedError
from treadle_experience.core.transitions import PayloadsReleased, Transition, WithPayload
from treadle_experience.ports import Durability, Snapshot


@dataclass(slots=True)
class MemoryLedger:
    """Ledger plugin `memory`. Nothing survives the process: for trials and tests."""

    _run_id: str = field(default="", init=False)
    _writer_epoch: int = field(default=0, init=False)
    _position: int = field(default=0, init=False)
    _journal: list[Transition] = field(default_factory=list[Transition], init=False)
    _inline: dict[str, bytes] = field(default_factory=dict[str, bytes], init=False)

    @property
    def durability(self) -> Durability:
        return Durability.NONE

    def acquire(self, run_id: str) -> int:
        if self._run_id not in ("", run_id):
            raise WrongRunError(
                f"the ledger belongs to run {self._run_id}",
                field="run.id",
                limit=self._run_id,
                value=run_id,
            )
        self._run_id = run_id
        self._writer_epoch += 1
        return self._writer_epoch

    def load(self) -> Iterable[Transition]:
        for transition in list(self._journal):
            if isinstance(transition, WithPayload):
                yield replace(transition, inline=self._inline.get(transition.episode_id))
            else:
                yield transition

    def append(self, transitions: Sequence[Transition], writer_epoch: int) -> None:
        self._check(writer_epoch)
        for transition in transitions:
            if isinstance(transition, WithPayload) and transition.inline is not None:
                self._inline[transition.episode_id] = transition.inline
            elif isinstance(transition, PayloadsReleased):
                for episode_id in transition.episode_ids:
                    self._inline.pop(episode_id, None)
        self._journal += map(_bare, transitions)
        self._position += len(transitions)

    def condense(self, head: Sequence[Transition], position: int, writer_epoch: int) -> None:
        self._check(writer_epoch)
        later = self._position - position
        self._journal = [*map(_bare, head), *self._journal[len(self._journal) - later :]]

    def read(self) -> Snapshot:
        return Snapshot(self._position, list(self.load()))

    def _check(self, writer_epoch: int) -> None:
        if writer_epoch != self._writer_epoch:
            raise WriterFencedError(
                f"writer epoch {writer_epoch} is fenced by epoch {self._writer_epoch}",
                field="writer_epoch",
                limit=self._writer_epoch,
                value=writer_epoch,
            )

    def close(self) -> None:
        """Keeps everything, so that a successor in the same process finds it."""


def _bare(transition: Transition) -> Transition:
    return replace(transition, inline=None) if isinstance(transition, WithPayload) else transition
