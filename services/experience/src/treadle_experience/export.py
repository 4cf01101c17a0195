"""`treadle export RUN OUT`: writes the groups that a run trained on, for `treadle replay`.

Reads only, while the run goes on or after. OUT gets `export.json`, `steps/000001.jsonl` and so on,
and `payloads`, each under its sha256. Lines for people on stderr; on stdout one JSON object a
measure.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from treadle_core.errors import PayloadMissingError, TreadleError
from treadle_core.media import Medium
from treadle_experience import wire
from treadle_experience.core.state import Episode
from treadle_experience.core.steps import ClaimedTask
from treadle_experience.episodes_ledger import payloads_of
from treadle_experience.ledgers import read_ledger
from treadle_experience.payloads import load
from treadle_experience.recorded import Recorded, RecordedStep, recorded
from treadle_payloads.files import FileStore
from treadle_payloads.media import reference_of
from treadle_payloads.store import PayloadStore
from treadle_runtime.files import write_durably
from treadle_runtime.measures import Measure, report

FORMAT = 1
FILE_NAME = "export.json"
UNREADABLE = 2


def main(argv: list[str]) -> int:
    """Returns 0, 1 where something could not be exported, or UNREADABLE."""
    parser = argparse.ArgumentParser(prog="treadle export", description=__doc__)
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("out", type=Path, help="folder to write; what lies there is completed")
    parser.add_argument("--ready", action="store_true", help="whole groups not trained on, too")
    args = parser.parse_args(argv)
    try:
        found = recorded(read_ledger(args.run).journal)
        exporter = Exporter(found, payloads_of(args.run), args.out)
        measures = list(exporter.run(with_ready=args.ready))
    except TreadleError as error:
        sys.stderr.write(f"{args.run}: {error}\n")
        return UNREADABLE
    for message in exporter.missing.values():
        sys.stderr.write(f"{args.run}: {message}\n")
    return report(measures)


class Exporter:
    """Writes steps one by one; what is there already stays as it is."""

    def __init__(self, found: Recorded, source: PayloadStore | None, out: Path) -> None:
        self._found = found
        self._source = source
        self._out = out
        self._store = FileStore(out / "payloads")
        (out / "steps").mkdir(exist_ok=True)
        self._bytes = 0
        self.missing: dict[int, str] = {}
        """Why a step was left out, by its number; 0 is what is ready."""

    def run(self, *, with_ready: bool) -> Iterator[Measure]:
        """Exports all; measures it."""
        written = [step for step in self._steps() if self._exported(step)]
        ready = self._found.ready if with_ready else []
        if ready and self._has_copied(0, ready):
            self._write("ready.jsonl", map(_row, ready))
        tasks = [task for step in written for task in step.tasks]
        head: dict[str, Any] = {
            "format": FORMAT,
            "run_id": self._found.run_id,
            "steps": [step.step for step in written],
            "missing": {str(step): why for step, why in self.missing.items()},
        }
        write_durably(self._out / FILE_NAME, json.dumps(head, indent=2).encode())
        yield Measure("exported_steps", len(written), "steps")
        yield Measure("exported_groups", len(tasks), "groups")
        yield Measure("exported_episodes", sum(len(task.episodes) for task in tasks), "episodes")
        yield Measure("exported_bytes", self._bytes, "bytes")
        yield Measure("missing_steps", len(self.missing), "steps", "== 0")

    def _steps(self) -> Iterator[RecordedStep]:
        for number in range(1, self._found.trained_step + 1):
            if number in self._found.steps:
                yield self._found.steps[number]
            else:
                self.missing[number] = f"step {number}: the ledger has forgotten it"

    def _exported(self, step: RecordedStep) -> bool:
        if not self._has_copied(step.step, step.tasks):
            return False
        head = {"step": step.step, "last": step.last, "metrics": dict(step.metrics)}
        self._write(f"steps/{step.step:06d}.jsonl", [head, *map(_row, step.tasks)])
        return True

    def _has_copied(self, step: int, tasks: Sequence[ClaimedTask]) -> bool:
        """Copies payloads and media of groups; where one is gone, `missing` says which and why."""
        for episode in (each for task in tasks for each, _ in task.episodes):
            try:
                self._bytes += self._copy(episode)
            except TreadleError as error:
                what = f"step {step}" if step else "ready groups"
                self.missing[step] = f"{what}: episode {episode.episode_id}: {error.message}"
                return False
        return True

    def _copy(self, episode: Episode) -> int:
        if episode.result is None:
            return 0
        inline = self._found.inline.get(episode.episode_id)
        data = load(episode.result, inline, self._source)
        self._store.put(bytes(data))
        return len(data) + sum(map(self._copy_medium, episode.result.media))

    def _copy_medium(self, medium: Medium) -> int:
        """The bytes that it took; none where it was copied before."""
        reference = reference_of(medium)
        if self._store.has(reference):
            return 0
        if self._source is None:
            message = f"medium {medium.sha256} is not in the run, which has no payload store"
            raise PayloadMissingError(message, field="sha256", value=medium.sha256)
        data = self._source.get(reference)
        self._store.put(bytes(data))
        return len(data)

    def _write(self, name: str, rows: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> None:
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        write_durably(self._out / name, text.encode())


def _row(task: ClaimedTask) -> dict[str, Any]:
    """The group as JSON of `treadle.experience.v1.ClaimedTask`."""
    message = wire.claimed_task(task)
    for episode in message.episodes:
        for stored in (episode.result.payload, *episode.result.media):
            stored.ClearField("node")
            stored.ClearField("epoch")
    return json_format.MessageToDict(message, preserving_proto_field_name=True)
