"""`treadle episodes RUN [EPISODE]`: lists a run's episodes, or shows one.

Reads only, while the run goes on or after. An episode may be named by the first letters of its id.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from treadle_core.episodes import Segment, Termination
from treadle_core.errors import PayloadMissingError, TreadleError
from treadle_experience.core.state import EpisodeState, TaskState
from treadle_experience.episodes_ledger import Record, payloads_of, read_episodes, read_segments
from treadle_experience.transcripts import Words, pieces

UNREADABLE = 2
UNKNOWN = 1
_ID_SHOWN = 12
_COLUMNS = "{:<14}{:<26}{:>6}  {:<12}{:>8}  {:<11}{:>7}  {}"


def main(argv: list[str]) -> int:
    """Returns 0, UNKNOWN where no episode or more than one has the name, or UNREADABLE."""
    args = _parser().parse_intermixed_args(argv)
    try:
        records = read_episodes(args.run)
        if not args.episode:
            _list([each for each in records if _matches(each, args)], args)
            return 0
        found = [each for each in records if each.episode_id.startswith(args.episode)]
        if len(found) != 1:
            many = f"{len(found)} episodes" if found else "no episode"
            sys.stderr.write(f"{args.run}: {many} whose id begins with {args.episode}\n")
            return UNKNOWN
        _show(found[0], args)
    except TreadleError as error:
        sys.stderr.write(f"{args.run}: {error}\n")
        return UNREADABLE
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="treadle episodes", description=__doc__)
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("episode", nargs="?", default="", help="id, or its beginning: show it")
    parser.add_argument("--tokens", action="store_true", help="show every token of the episode")
    parser.add_argument("--json", action="store_true", help="one JSON object an episode")
    chosen = parser.add_argument_group("which to list")
    chosen.add_argument("--task", help="of this task")
    states = sorted({*EpisodeState, *TaskState})
    chosen.add_argument("--state", choices=states, help="that are in it, or whose task is")
    chosen.add_argument("--step", type=_range(int), help="trained or scored in it: 7 or 7..9")
    chosen.add_argument("--reward", type=_range(float), help="within: 0.5..1, 0.5.. or ..0.5")
    chosen.add_argument("--evaluation", help="of this evaluation set; '' for training only")
    chosen.add_argument("--termination", choices=[each.value for each in Termination])
    chosen.add_argument("--version", type=int, help="with a token that it sampled")
    chosen.add_argument("--limit", type=int, default=20, help="the newest so many; 0: all")
    return parser


def _range(number: Callable[[str], float]) -> Callable[[str], tuple[float, float]]:
    def parse(text: str) -> tuple[float, float]:
        low, dots, high = text.partition("..")
        least = number(low) if low else float("-inf")
        return least, (number(high) if high else float("inf")) if dots else least

    parse.__name__ = "range, as 7, 7..9, 7.. or ..9"
    return parse


def _matches(record: Record, args: argparse.Namespace) -> bool:
    result = record.result
    reward = result.reward if result else None
    return (
        args.task in (None, record.task_id)
        and args.state in (None, record.episode_state, record.task_state)
        and args.evaluation in (None, record.evaluation)
        and (args.step is None or args.step[0] <= record.step <= args.step[1])
        and (args.reward is None or _within(reward, args.reward))
        and (args.termination is None or (result and result.termination.value) == args.termination)
        and (args.version is None or (result is not None and args.version in result.versions))
    )


def _within(reward: float | None, bounds: tuple[float, float]) -> bool:
    return reward is not None and bounds[0] <= reward <= bounds[1]


def _list(records: list[Record], args: argparse.Namespace) -> None:
    shown = records[-args.limit :] if args.limit else records
    if args.json:
        sys.stdout.writelines(json.dumps(each.row()) + "\n" for each in shown)
        return
    header = ("episode", "task", "step", "state", "reward", "ended", "tokens", "versions")
    lines = [_COLUMNS.format(*header), *map(_line, shown)]
    sys.stdout.writelines(line.rstrip() + "\n" for line in lines)
    if len(shown) < len(records):
        sys.stderr.write(f"the newest {len(shown)} of {len(records)}; --limit 0 shows all\n")


def _line(record: Record) -> str:
    result = record.result
    return _COLUMNS.format(
        record.episode_id[:_ID_SHOWN],
        record.task_id,
        record.step or ("0" if record.evaluation else ""),
        record.state,
        "" if result is None or result.reward is None else f"{result.reward:.3f}",
        result.termination.value if result else "",
        result.num_tokens if result else "",
        _spans(result.versions) if result else "",
    )


def _show(record: Record, args: argparse.Namespace) -> None:
    words = Words.of_run(args.run)
    try:
        segments, missing = read_segments(record, payloads_of(args.run)), ""
    except PayloadMissingError as error:
        segments, missing = (), error.message
    media = record.result.media if record.result else ()
    said = [each.row() for each in pieces(segments, words, media)]
    rows = list(token_rows(segments, words)) if args.tokens else []
    if args.json:
        row = record.row() | {"spec": dict(record.spec), "pieces": said}
        row |= {"missing": missing} if missing else {}
        row |= {"token_rows": rows} if args.tokens else {}
        sys.stdout.write(json.dumps(row) + "\n")
        return
    sys.stdout.writelines(line.rstrip() + "\n" for line in _head(record))
    if missing:
        sys.stdout.write(f"\n{missing}\n")
    elif words.are_ids:
        sys.stdout.write("\nneither run.model nor a checkpoint has the tokenizer.json: token ids\n")
    sys.stdout.writelines(line.rstrip() + "\n" for line in _transcript(said))
    sys.stdout.writelines(line.rstrip() + "\n" for line in _token_table(rows))


def token_rows(segments: Iterable[Segment], words: Words) -> Iterator[dict[str, Any]]:
    """Every token of an episode; log-probability and version of those that were sampled."""
    for number, segment in enumerate(segments):
        for place, id_ in enumerate(segment.token_ids.tolist()):
            row: dict[str, Any] = {"segment": number, "place": place, "id": id_}
            row |= {"text": words.of([id_]), "trained": bool(segment.trained[place])}
            if segment.sampled[place]:
                row["logprob"] = float(segment.logprobs[place])
                row["version"] = int(segment.policy_version[place])
                row["context_version"] = int(segment.context_version[place])
            yield row


def _head(record: Record) -> Iterator[str]:
    place = f"evaluation {record.evaluation} at step" if record.evaluation else "training, step"
    step = record.step or ("0" if record.evaluation else "none yet")
    yield f"episode {record.episode_id}"
    yield f"  task      {record.task_id}  {json.dumps(dict(record.spec), ensure_ascii=False)}"
    yield f"  where     {place} {step}  {record.state} {record.reason}"
    yield f"  attempt   {record.attempt} on {record.replica_id or 'no replica yet'}"
    result = record.result
    if result is None:
        return
    turns = "" if not result.turn_rewards else f" by turn {_numbers(result.turn_rewards)}"
    reward = "absent" if result.reward is None else f"{result.reward:g}"
    yield f"  reward    {reward}{turns}  {result.termination.value}"
    yield f"  tokens    {result.num_tokens}, {result.num_trained} trained"
    yield f"  versions  {_spans(result.versions)}"
    if result.media:
        size = sum(medium.size for medium in result.media)
        yield f"  media     {len(result.media)}, {size} bytes"
    if result.metrics:
        pairs = (f"{name} {value:g}" for name, value in sorted(result.metrics.items()))
        yield f"  metrics   {', '.join(pairs)}"
    yield f"  trace     {record.trace_id or 'none'}"


def _transcript(said: list[dict[str, Any]]) -> Iterator[str]:
    for piece in said:
        speaker = piece["role"] + (f" v{_spans(piece['versions'])}" if piece["versions"] else "")
        first, *rest = piece["text"].split("\n")
        if piece["role"] != "observation":
            yield ""
        yield f"  {speaker:<14}{first}"
        for line in rest:
            yield f"  {'':<14}{line}"


def _token_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    if rows:
        yield ""
        yield f"{'':>6}{'id':>8}  {'trained':<9}{'log p':>9}{'p':>8}{'version':>9}  text"
    for row in rows:
        trained = "yes" if row["trained"] else "no" if "logprob" in row else "-"
        numbers = ""
        if "logprob" in row:
            logprob = row["logprob"]
            numbers = f"{logprob:>9.4f}{np.exp(logprob):>8.4f}{row['version']:>9}"
        yield f"{row['place']:>6}{row['id']:>8}  {trained:<9}{numbers:<26}  {row['text']!r}"


def _spans(versions: Iterable[int]) -> str:
    """Ascending numbers, as `3-5, 9`."""
    spans: list[list[int]] = []
    for version in versions:
        if spans and version == spans[-1][1] + 1:
            spans[-1][1] = version
        else:
            spans.append([version, version])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _numbers(values: Iterable[float]) -> str:
    return " ".join(f"{value:g}" for value in values)
