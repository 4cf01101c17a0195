"""What each engine is to do next, when a version commits, and what the trainer is asked for.

Level-triggered: answers depend on what engines say now and on what the ledger committed, never on
what was answered before, so that nothing is lost with an answer, an engine, a trainer or refit.
"""

from dataclasses import dataclass

from treadle_refit.core.fleet import Engine, Fleet, Report
from treadle_refit.core.publication import Publication, Versions


@dataclass(frozen=True, slots=True)
class Load:
    """Copy the version's bytes into the arrival buffer and verify them; go on decoding."""

    publication: Publication


@dataclass(frozen=True, slots=True)
class Install:
    """Install the verified version between two tokens; it is committed."""

    version: int
    trace_id: str
    """Trace of the step that it came from; may be empty."""


@dataclass(frozen=True, slots=True)
class Discard:
    """Forget the verified version; it was aborted."""

    version: int


@dataclass(frozen=True, slots=True)
class Alias:
    """Serve the same weights under another number; it is committed."""

    version: int
    base: int
    """Version that the engine serves."""
    trace_id: str
    """Trace of the step that the version came from; may be empty."""


Order = Load | Install | Discard | Alias


def next_order(versions: Versions, report: Report) -> Order | None:
    """The one thing that an engine should do; None for going on as it is.

    Versions never go back on an engine, and none is installed before it is committed.
    """
    if report.draining:
        return None
    verified = report.verified
    if verified > report.serving:
        # An older one that is committed is installed too: an engine that is slower than the
        # trainer publishes would otherwise load for ever and never move.
        if versions.is_committed(verified):
            return Install(verified, versions.trace_of(verified))
        sent = _sent(versions)
        if sent and sent.version == verified:
            return None
        return Discard(verified)
    held = versions.held
    if held and report.serving in held.same:
        return Alias(held.version, report.serving, held.trace_id)
    wanted = _loadable(versions, report)
    return Load(wanted) if wanted else None


def pending(versions: Versions, fleet: Fleet, now: float) -> list[Engine]:
    """Members for which the commit of the version in flight waits; none when nothing is sent."""
    sent = _sent(versions)
    if not sent or now >= sent.commit_at:
        return []
    return [
        engine
        for engine in fleet.members(now)
        if not sent.held_by(engine.report) and engine.report.failed < sent.version
    ]


def demand_at(versions: Versions, fleet: Fleet, now: float) -> float | None:
    """When the trainer is asked for its parameters; None while every engine has or can get them.

    A version in flight is an answer on its way. An engine that fails to load one version after
    another is waited with longer and longer.
    """
    if versions.in_flight:
        return None
    starving = (
        max(engine.retry_at, now)
        for engine in fleet.members(now)
        if not engine.report.holds(max(versions.newest, 1))
        and next_order(versions, engine.report) is None
    )
    return min(starving, default=None)


def _loadable(versions: Versions, report: Report) -> Publication | None:
    """What the engine can load and has not failed to load.

    One that serves nothing takes the committed version, which it may install at once; one that
    serves takes the version in flight, whose commit may be waiting for it.
    """
    choices = [versions.held, _sent(versions)]
    for choice in choices if report.serving == 0 else reversed(choices):
        if choice and choice.version > report.failed and not choice.held_by(report):
            return choice
    return None


def _sent(versions: Versions) -> Publication | None:
    return versions.in_flight if versions.in_flight and versions.in_flight.sent else None
