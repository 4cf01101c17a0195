"""Versions on their way: at most one in flight, and the newest committed one.

ANNOUNCED -> SENT -> COMMITTED; an aborted one is forgotten, since the ledger remembers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from treadle_core.errors import InvalidFieldError
from treadle_refit.core.errors import VersionEndedError
from treadle_weights.layouts import Layout
from treadle_weights.transport import Arena

_REMEMBERED = 64
"""Committed versions that an engine may still hold verified; older ones it loads anew."""


@dataclass(frozen=True, slots=True)
class Publication:
    """One version, as its trainer opened it."""

    version: int
    step: int
    trainer_epoch: int
    request_id: str
    trace_id: str
    layout: Layout
    """The trainer's layout in the arena."""
    arena: Arena
    opened_at: float
    digests: Mapping[str, int] = field(default_factory=dict[str, int])
    """Of each tensor, by name; empty until the bytes lie in the arena."""
    commit_at: float = 0.0
    """When it is committed without those that have not verified it."""
    members: int = 0
    """Engines that had verified it when it was committed."""
    left_behind: int = 0
    """Members that had not."""

    @property
    def sent(self) -> bool:
        """Whether the bytes lie in the arena."""
        return bool(self.digests)


@dataclass(slots=True)
class Versions:
    """What refit knows of a run's versions."""

    newest: int
    """Newest committed version; 0 when there is none."""
    in_flight: Publication | None = None
    """Announced or sent, not yet committed."""
    held: Publication | None = None
    """The newest committed one, if its trainer may still hold the bytes."""
    _traces: dict[int, str] = field(default_factory=dict[int, str], init=False)

    def __post_init__(self) -> None:
        """Counts the newest among the committed."""
        self.learn(self.newest)

    def learn(self, newest: int) -> None:
        """Takes the newest committed version from the ledger; it never falls."""
        if self.in_flight and self.in_flight.version == newest:
            # Its commit was recorded, and only the answer was lost.
            self.commit(self.in_flight)
        self.newest = max(self.newest, newest)
        if self.newest:
            self._remember(self.newest, "")
        if self.held and self.held.version < self.newest:
            self.held = None
        if self.in_flight and self.in_flight.version < self.newest:
            self.in_flight = None

    def is_committed(self, version: int) -> bool:
        """Whether the ledger is known to have committed it; unknown counts as no."""
        return version in self._traces

    def trace_of(self, version: int) -> str:
        """Trace of the step that a committed version came from; empty where unknown."""
        return self._traces.get(version, "")

    def find(self, request_id: str) -> Publication | None:
        """The publication that a request opened, unless it has ended."""
        for publication in (self.in_flight, self.held):
            if publication and publication.request_id == request_id:
                return publication
        return None

    def begin(self, publication: Publication) -> Publication | None:
        """Puts a version in flight; returns the one that it replaces, which has to be aborted.

        Raises VersionEndedError where a newer version is in flight or committed.
        """
        replaced = self.in_flight
        if publication.version <= max(self.newest, replaced.version if replaced else 0):
            raise self.ended(publication.version)
        self.in_flight = publication
        return replaced

    def send(
        self, version: int, trainer_epoch: int, digests: Mapping[str, int], commit_at: float
    ) -> Publication:
        """The bytes lie in the arena. Sent again, it keeps its time.

        Raises VersionEndedError, or InvalidFieldError where the digests are not the layout's, or
        not those that were sent before.
        """
        publication = self.in_flight
        if publication is None or (publication.version, publication.trainer_epoch) != (
            version,
            trainer_epoch,
        ):
            raise self.ended(version)
        for name in digests.keys() ^ publication.layout.by_tensor.keys():
            limit = "a tensor of the layout" if name in digests else "a digest"
            raise InvalidFieldError(f"digests[{name}]", limit=limit, value="none")
        if publication.sent:
            if publication.digests != digests:
                raise InvalidFieldError("digests", limit="as sent before", value="others")
            return publication
        sent = replace(publication, digests=dict(digests), commit_at=commit_at)
        self.in_flight = sent
        return sent

    def commit(self, publication: Publication) -> None:
        """The ledger recorded the commit."""
        if self.in_flight and self.in_flight.version == publication.version:
            self.in_flight = None
        self._remember(publication.version, publication.trace_id)
        if publication.version >= self.newest:
            self.newest = publication.version
            self.held = publication

    def abort(self, version: int) -> None:
        """The version will never be committed."""
        if self.in_flight and self.in_flight.version == version:
            self.in_flight = None

    def ended(self, version: int) -> VersionEndedError:
        """The refusal of a version that is not in flight."""
        current = self.in_flight.version if self.in_flight else "none"
        return VersionEndedError(
            f"version {version} is not in flight (in flight: {current}, newest: {self.newest})",
            field="version",
            limit=f"the one in flight: {current}",
            value=version,
        )

    def _remember(self, version: int, trace_id: str) -> None:
        self._traces[version] = trace_id or self._traces.get(version, "")
        for old in sorted(self._traces)[:-_REMEMBERED]:
            del self._traces[old]
