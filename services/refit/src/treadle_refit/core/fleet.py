"""Which engines there are, from what they say of themselves. Times are seconds of one clock."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from treadle_weights.layouts import Layout

_FIRST_BACKOFF_S = 2.0
_LONGEST_BACKOFF_S = 60.0


class EngineState(StrEnum):
    """Where an engine stands; derived, never stored."""

    JOINING = "joining"
    """It serves nothing yet."""
    SYNCING = "syncing"
    """It serves an older version than the newest committed one, or is about to serve its first."""
    SERVING = "serving"
    """It serves the newest committed version."""
    SUSPECT = "suspect"
    """It missed a heartbeat; no commit waits for it. It serves again if it missed no commit, and
    syncs otherwise."""
    DEAD = "dead"
    """It is no member. When it calls again it syncs, and serves from the call after."""


@dataclass(frozen=True, slots=True)
class Report:
    """All that an engine is, as it says itself in each heartbeat."""

    engine_id: str
    layout: Layout
    serving: int = 0
    """Version that it serves; 0 when none."""
    verified: int = 0
    """Version whose bytes it holds verified and not installed; 0 when none."""
    failed: int = 0
    """Version that it could not load; 0 when none."""
    failure: str = ""
    """Why, for people."""
    draining: bool = False
    """It joins no further version."""

    def holds(self, version: int) -> bool:
        """Whether the engine needs nothing more to serve `version` or a newer one."""
        return self.verified == version or self.serving >= version


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine and what can be told from its reports."""

    report: Report
    seen_at: float
    failures: int = 0
    """Versions in a row that it could not load."""
    failed_at: float = 0.0
    """When it reported the last of them."""
    settled: bool = False
    """It was a member when it called before: neither new nor back from the dead."""

    @property
    def retry_at(self) -> float:
        """When it is worth while to try another version: at once after one failure, then later.

        A first failure is most often an arena that went with its trainer.
        """
        if self.failures <= 1:
            return self.failed_at
        exponent = min(self.failures - 2, 16)
        return self.failed_at + min(_FIRST_BACKOFF_S * 2**exponent, _LONGEST_BACKOFF_S)


class Fleet:
    """The engines that were heard of within `dead_after_s`."""

    def __init__(self, dead_after_s: float) -> None:
        self._dead_after_s = dead_after_s
        self._engines: dict[str, Engine] = {}

    @property
    def longest_silence_s(self) -> float:
        """An engine that calls within this time is never suspect, one late call included."""
        return self._dead_after_s / 3

    def hear(self, report: Report, now: float) -> bool:
        """Takes a heartbeat; says whether anything of the engine is news."""
        before = self._engines.get(report.engine_id)
        failures, failed_at = (before.failures, before.failed_at) if before else (0, now)
        if report.failed and (before is None or report.failed != before.report.failed):
            failures, failed_at = failures + 1, now
        elif report.failed < max(report.serving, report.verified):
            failures = 0
        self._engines[report.engine_id] = Engine(
            report, now, failures, failed_at, settled=before is not None
        )
        return before is None or before.report != report

    def miss(self, engine_id: str, heard_at: float, now: float) -> None:
        """The connection of the heartbeat of `heard_at` broke: unless a later one came, suspect."""
        engine = self._engines.get(engine_id)
        if engine and engine.seen_at == heard_at:
            seen_at = min(heard_at, now - self._dead_after_s / 2)
            self._engines[engine_id] = replace(engine, seen_at=seen_at)

    def forget(self, engine_id: str) -> None:
        """Drops an engine that can be no member."""
        self._engines.pop(engine_id, None)

    def bury(self, now: float) -> list[Engine]:
        """Drops and returns the dead."""
        dead = [e for e in self._engines.values() if now - e.seen_at >= self._dead_after_s]
        for engine in dead:
            self.forget(engine.report.engine_id)
        return dead

    def members(self, now: float) -> list[Engine]:
        """Engines that are alive and join further versions."""
        return [
            engine
            for engine in self._engines.values()
            if not engine.report.draining and now < self._suspect_at(engine)
        ]

    def state(self, engine_id: str, newest: int, now: float) -> EngineState:
        """Where an engine stands, given the newest committed version."""
        engine = self._engines.get(engine_id)
        if engine is None or now - engine.seen_at >= self._dead_after_s:
            return EngineState.DEAD
        if now >= self._suspect_at(engine):
            return EngineState.SUSPECT
        if engine.settled and engine.report.serving and engine.report.serving >= newest:
            return EngineState.SERVING
        if engine.report.serving or engine.report.verified:
            return EngineState.SYNCING
        return EngineState.JOINING

    def next_change(self, now: float) -> float | None:
        """When silence alone makes the next engine suspect or dead; None for never."""
        moments: Iterable[float] = (
            moment
            for engine in self._engines.values()
            for moment in (self._suspect_at(engine), engine.seen_at + self._dead_after_s)
            if moment > now
        )
        return min(moments, default=None)

    def _suspect_at(self, engine: Engine) -> float:
        return engine.seen_at + self._dead_after_s / 2
