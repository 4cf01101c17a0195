"""Versions on their way: at most one in flight, and the newest committed one.

ANNOUNCED -> SENT -> COMMITTED; an aborted one is forgotten, since the ledger remembers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from treadle_core.errors import InvalidFieldError
from treadle_refit.core.errors import VersionEndedError
from treadle_refit.core.fleet import Report
from treadle_weights.digests import weights_digest
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
    """Where what lies in the arena."""
    arena: Arena
    opened_at: float
    open_s: float = 0.0
    """What opening it took."""
    same: frozenset[int] = frozenset()
    """Committed versions of the same weights; empty unless it is an alias."""
    expected: Mapping[str, int] = field(default_factory=dict[str, int])
    """Digests of an alias's base; empty for other versions."""
    digests: Mapping[str, int] = field(default_factory=dict[str, int])
    """Of each tensor, by name; empty until the bytes lie in the arena."""
    sent_at: float = 0.0
    """When they were said to lie there."""
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

    @property
    def aliased(self) -> bool:
        """Whether it has the bytes of an older version."""
        return bool(self.same)

    def held_by(self, report: Report) -> bool:
        """Whether the engine needs no further byte to serve this version or a newer one."""
        return report.holds(self.version) or report.serving in self.same


@dataclass(slots=True)
class Versions:
    """What refit knows of a run's versions."""

    newest: int = 0
    """Newest committed version; 0 when there is none."""
    in_flight: Publication | None = None
    """Announced or sent, not yet committed."""
    held: Publication | None = None
    """The newest committed one, if its trainer may still hold the bytes."""
    _traces: dict[int, str] = field(default_factory=dict[int, str], init=False)

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

    def hold(self, publication: Publication) -> None:
        """A committed version turned out to lie where engines can load it."""
        if self.held is None and publication.version == self.newest:
            self.held = publication

    def base(self, alias_of: int, weights: str, layout: Layout) -> Publication | None:
        """The version whose bytes an alias has; None where it needs bytes of its own.

        Raises InvalidFieldError where `weights` is not the digest of that version.
        """
        held = self.held
        if not alias_of or held is None or held.version != alias_of:
            return None
        if held.layout.tensors != layout.tensors:
            return None
        if (known := weights_digest(held.digests)) != weights:
            limit = f"{known}, of version {alias_of}"
            raise InvalidFieldError("weights_digest", limit=limit, value=repr(weights[:40]))
        return held

    def send(
        self,
        version: int,
        trainer_epoch: int,
        digests: Mapping[str, int],
        *,
        commit_at: float,
        sent_at: float = 0.0,
    ) -> Publication:
        """The bytes lie in the arena. Sent again, it keeps its times.

        Raises VersionEndedError, or InvalidFieldError where the digests are not the layout's, not
        an alias's base's, or not those that were sent before.
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
        before = publication.digests or publication.expected
        if before and before != digests:
            raise InvalidFieldError("digests", limit="as sent before", value="others")
        if publication.sent:
            return publication
        sent = replace(publication, digests=dict(digests), sent_at=sent_at, commit_at=commit_at)
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
