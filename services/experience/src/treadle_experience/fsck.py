"""`treadle fsck RUN`: counts a run's ledger by state, and reconciles it.

Reads only, while the run goes on or after. Lines for people on stderr; on stdout one JSON object
a measure.
"""

import argparse
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from treadle_core.errors import TreadleError
from treadle_core.media import Medium
from treadle_experience.core.apply import apply
from treadle_experience.core.audit import Account, reconcile
from treadle_experience.core.state import Episode, RunState
from treadle_experience.core.transitions import WithPayload
from treadle_experience.episodes_ledger import payload_parameters, payloads_of
from treadle_experience.ledgers import read_ledger
from treadle_experience.payloads import load
from treadle_experience.ports import Snapshot
from treadle_payloads.media import fetch_media
from treadle_payloads.store import PayloadStore
from treadle_runtime.measures import NONE, Measure, report

UNREADABLE = 2


@dataclass(frozen=True, slots=True)
class Findings:
    """What one look at a ledger found."""

    state: RunState
    account: Account
    gaps: int
    """Positions of the journal that hold nothing."""
    without_payload: frozenset[str]
    """Pending episodes whose payload, or a medium of theirs, is not there, or is not what its
    sha256 says."""
    elsewhere: int
    """Pending episodes of which something lies on another node, and is not looked at."""
    media: int
    """Distinct media of pending episodes."""


def main(argv: list[str]) -> int:
    """Returns 0, or 1 when a goal does not hold, or UNREADABLE."""
    parser = argparse.ArgumentParser(prog="treadle fsck", description=__doc__)
    parser.add_argument("run", type=Path, help="directory of the run")
    directory: Path = parser.parse_args(argv).run
    try:
        found = examine(directory)
    except TreadleError as error:
        sys.stderr.write(f"{directory}: {error}\n")
        report([Measure("readable", 0, "ledgers", "== 1")])
        return UNREADABLE
    measures = list(measure(found))
    sys.stderr.write(_for_people(found, measures))
    return report(measures)


def examine(directory: Path) -> Findings:
    """Takes stock of the run in `directory`.

    Raises LedgerFormatError when its journal cannot be read or does not follow, LedgerLostError and
    LedgerAwayError where it lies on a server that has it no more, or is not there.
    """
    store, node = payloads_of(directory), payload_parameters(directory).get("node", "")
    found = _examine(read_ledger(directory), store, node)
    if found.without_payload:
        # A run that goes on may have released them since the snapshot.
        later = _examine(read_ledger(directory), store, node)
        found = replace(found, without_payload=found.without_payload & later.without_payload)
    return found


def measure(found: Findings) -> Iterable[Measure]:
    """All measures of a ledger, the reconciliation last."""
    state, account = found.state, found.account
    yield Measure("position", state.position, "transitions")
    yield Measure("trained_step", state.trained_step, "steps")
    yield Measure("checkpoints", len(state.lineage), "checkpoints")
    for name, count in sorted(state.task_counts.items()):
        yield Measure(f"tasks_{name}", count, "tasks")
    for name, count in sorted(state.episode_counts.items()):
        yield Measure(f"episodes_{name}", count, "episodes")
    for name, count in sorted(state.reasons.items()):
        yield Measure(f"reason_{name}", count, "tasks")
    yield Measure("lost_payloads", state.lost_payloads, "episodes")
    if found.elsewhere:
        yield Measure("payloads_elsewhere", found.elsewhere, "episodes")
    if found.media:
        yield Measure("media", found.media, "media")
    yield Measure("acknowledged", account.num_acknowledged(), "episodes")
    for place in ("consumed", "filtered", "evicted", "quarantined", "scored", "pending"):
        yield Measure(place, account.num_in(place), "episodes")
    yield Measure("unaccounted", account.unaccounted(), "episodes", "== 0")
    lost = account.missing() | found.without_payload
    yield Measure("lost", len(lost) + found.gaps, "episodes", "== 0")
    yield Measure("trained_twice", len(account.trained_twice()), "episodes", "== 0")
    yield Measure("double_counted", len(account.double_counted()), "episodes", "== 0")


def _examine(snapshot: Snapshot, store: PayloadStore | None, node: str) -> Findings:
    journal, state = snapshot.journal, RunState()
    for transition in journal:
        apply(state, transition)
    account = reconcile(journal, state)
    inline = {each.episode_id: each.inline for each in journal if isinstance(each, WithPayload)}
    pending = [state.episodes[id_] for id_ in account.places["pending"]]
    here = ("", node)
    elsewhere = {each.episode_id for each in pending if not _nodes_of(each).issubset(here)}
    looked_at = [each for each in pending if each.episode_id not in elsewhere]
    intact = _intact_media(looked_at, store)
    without = frozenset(
        each.episode_id
        for each in looked_at
        if not _is_there(each, inline[each.episode_id], store, intact)
    )
    gaps = abs(snapshot.position - state.position)
    num_media = len({medium.sha256 for each in pending for medium in _media_of(each)})
    return Findings(state, account, gaps, without, len(elsewhere), num_media)


def _nodes_of(episode: Episode) -> set[str]:
    return {node for _, node in episode.result.stored()} if episode.result else set()


def _media_of(episode: Episode) -> tuple[Medium, ...]:
    return episode.result.media if episode.result else ()


def _intact_media(episodes: Iterable[Episode], store: PayloadStore | None) -> set[str]:
    """sha256 of what is there and right, of all that these episodes show; each is read once."""
    media = {medium.sha256: medium for each in episodes for medium in _media_of(each)}
    intact: set[str] = set()
    if store is not None:
        for sha256, medium in media.items():
            found = fetch_media([medium], store)[sha256]
            if not isinstance(found, TreadleError):
                intact.add(sha256)
    return intact


def _is_there(
    episode: Episode, inline: bytes | None, store: PayloadStore | None, intact: Collection[str]
) -> bool:
    result = episode.result
    if result is None or any(medium.sha256 not in intact for medium in result.media):
        return False
    try:
        load(result, inline, store)
    except TreadleError:
        return False
    return True


def _for_people(found: Findings, measures: Iterable[Measure]) -> str:
    lines = [f"run {found.state.run_id}, {'closed' if found.state.closed else 'open'}"]
    for each in measures:
        verdict = "" if each.goal == NONE else "  ok" if each.holds else "  BROKEN"
        lines.append(f"  {each.measure:<20}{each.value:>10} {each.unit}{verdict}")
    return "\n".join(lines) + "\n"
