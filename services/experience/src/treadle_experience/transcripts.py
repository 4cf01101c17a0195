"""What was said in an episode: its tokens as text, turn by turn."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from treadle_core.episodes import NO_VERSION, Segment
from treadle_core.errors import PayloadMissingError
from treadle_core.media import Medium
from treadle_experience.episodes_ledger import Record, payloads_of, read_episodes, read_segments
from treadle_experience.ledgers import has_ledger
from treadle_payloads.store import PayloadStore


class Words:
    """Turns token ids into text; into the ids themselves where there is no tokenizer."""

    def __init__(self, tokenizer: Path | None) -> None:
        """`tokenizer` is a `tokenizer.json`."""
        self._tokenizer = Tokenizer.from_file(str(tokenizer)) if tokenizer else None

    @classmethod
    def of_run(cls, directory: Path) -> "Words":
        """Those of the run's own tokenizer, where its model folder or a checkpoint has it."""
        return cls(find_tokenizer(directory))

    @property
    def are_ids(self) -> bool:
        """There is no tokenizer."""
        return self._tokenizer is None

    def of(self, ids: Sequence[int]) -> str:
        """The text of some tokens, special ones included."""
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def shown(self, segment: Segment, start: int, end: int, media: Sequence[Medium]) -> str:
        """The text of tokens `start` to `end`, with a note where they show a medium."""
        ids, parts, at = segment.token_ids.tolist(), list[str](), start
        known = {medium.sha256: medium for medium in media}
        for span in segment.media:
            if start <= span.start and span.end <= end:
                parts += [self.of(ids[at : span.start]), _note(known.get(span.sha256))]
                at = span.end
        parts.append(self.of(ids[at:end]))
        return (" " if self.are_ids else "").join(filter(None, parts))


@dataclass(frozen=True, slots=True)
class Piece:
    """What one side said without a break."""

    role: str
    """`prompt`, `policy`, or `observation`."""
    text: str
    versions: tuple[int, ...]
    """Distinct versions that sampled it, ascending; none unless the policy said it."""

    def row(self) -> dict[str, Any]:
        """The piece as JSON."""
        return {"role": self.role, "text": self.text, "versions": list(self.versions)}


def pieces(
    segments: Iterable[Segment], words: Words, media: Sequence[Medium] = ()
) -> Iterator[Piece]:
    """The segments of an episode, cut where the policy begins and ends to speak.

    A medium that is shown reads as `<image 12 KB png>`.
    """
    for segment in segments:
        edges = [0, *(np.flatnonzero(np.diff(segment.sampled)) + 1).tolist(), segment.num_tokens]
        for start, end in pairwise(edges):
            text = words.shown(segment, start, end, media)
            if not segment.sampled[start]:
                yield Piece("observation" if start else "prompt", text, ())
                continue
            versions = set(segment.policy_version[start:end].tolist()) - {NO_VERSION}
            yield Piece("policy", text, tuple(sorted(versions)))


def before_and_after(directory: Path, evaluation: str) -> list[dict[str, Any]]:
    """The same tasks of an evaluation set at the first and at the last step that was scored.

    An entry of `treadle.transcripts`: {"task", "before", "after"} for each task, in their order,
    with the task as JSON; each side has {"step", "reward" (or None), "termination", "pieces"}, the
    pieces {"role", "text", "versions"}. Empty where fewer than two steps were scored, or the run
    keeps no ledger.
    """
    if not has_ledger(directory):
        return []
    steps: dict[int, dict[int, Record]] = {}
    for record in read_episodes(directory):
        if record.evaluation == evaluation and record.result:
            steps.setdefault(record.step, {})[record.order] = record
    if len(steps) < 2:
        return []
    before, after = steps[min(steps)], steps[max(steps)]
    words, store = Words.of_run(directory), payloads_of(directory)
    pairs: list[dict[str, Any]] = []
    for order in sorted(before.keys() & after.keys()):
        try:
            sides = [_side(each, store, words) for each in (before[order], after[order])]
        except PayloadMissingError:  # a transcript less
            continue
        pairs.append({"task": dict(before[order].spec), "before": sides[0], "after": sides[1]})
    return pairs


def _note(medium: Medium | None) -> str:
    """What stands for a medium; nothing is known of one that its result does not name."""
    if medium is None:
        return "<image>"
    size = f"{round(medium.size / 1000)} KB" if medium.size >= 1000 else f"{medium.size} B"
    return f"<image {size} {medium.media_type.removeprefix('image/')}>"


def find_tokenizer(directory: Path) -> Path | None:
    """The `tokenizer.json` that a run began with: of its model folder, or kept by a checkpoint."""
    try:
        record = json.loads((directory / "run.json").read_text(encoding="utf-8"))
        model, digest = record["recipe"]["run"]["model"], record["model"]["tokenizer.json"]
    except (FileNotFoundError, KeyError):
        return None
    checkpoints = sorted((directory / "checkpoints").glob("step-*"), reverse=True)
    for folder in (Path(record.get("started_in", "")) / model, *checkpoints):
        path = folder / "tokenizer.json"
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == digest:
            return path
    return None


def _side(record: Record, store: PayloadStore | None, words: Words) -> dict[str, Any]:
    media = record.result.media if record.result else ()
    said = pieces(read_segments(record, store), words, media)
    return {
        "step": record.step,
        "reward": record.result and record.result.reward,
        "termination": record.result and record.result.termination.value,
        "pieces": [each.row() for each in said],
    }
