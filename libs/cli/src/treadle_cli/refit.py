"""`treadle refit show RUN`: how the newest version came to the engines, and where its time went."""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from treadle_cli import record, rows
from treadle_cli.rows import Row
from treadle_core.errors import InvalidFieldError
from treadle_runtime.config import BAD_CONFIGURATION

_WIDTH = 120
"""Characters of a line where no terminal says how many."""

PARTS = ("announce", "gather", "wire", "load", "verify", "pause")
"""Of a version's way, in their order; those of the engines are of the slowest one."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What the rows of a run say of its last refit."""

    version: Row
    """Row `version` of refit."""
    engines: list[Row]
    """Rows `version` of the engines that came to serve it."""
    plan: Row
    """Row `plan` of refit, of the last plan that was made; empty where there is none."""
    transport: str

    @property
    def seconds(self) -> dict[str, float]:
        """Of each of PARTS."""
        return {
            "announce": float(self.version["open_s"]),
            "gather": float(self.version["fill_s"]),
            "wire": self._slowest("wire_s"),
            "load": self._slowest("place_s"),
            "verify": self._slowest("verify_s"),
            "pause": self._slowest("install_s"),
        }

    def _slowest(self, key: str) -> float:
        return max((float(row.get(key, 0.0)) for row in self.engines), default=0.0)


def main(argv: list[str]) -> int:
    """Says how the newest version came to the engines. Reads only."""
    parser = argparse.ArgumentParser(prog="treadle refit", description=main.__doc__)
    parser.add_argument("what", choices=["show"], help="the last plan and the split of its time")
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    args = parser.parse_args(argv)
    try:
        found = read(args.run)
    except InvalidFieldError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_CONFIGURATION
    if args.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(as_text(found))
    return 0


def read(directory: Path) -> Shown:
    """Raises InvalidFieldError where no run lies, or where it has committed no version."""
    kept = record.read(directory)
    committed = rows.written(directory, "refit", "version")
    if not committed:
        raise InvalidFieldError("run", limit="a run that committed a version", value=directory)
    number = committed[-1]["version"]
    served = rows.written(directory, "rollout", "version")
    plans = rows.written(directory, "refit", "plan")
    transport = kept["recipe"].get("refit", {}).get("transport", {})
    return Shown(
        committed[-1],
        [row for row in served if row["version"] == number],
        plans[-1] if plans else {},
        str(transport.get("name", "shared_memory")),
    )


def as_text(shown: Shown) -> Group:
    """Three lines and a table."""
    version, plan = shown.version, shown.plan
    lines = [
        f"version {version['version']} of step {version['step']}: {version['members']} engines "
        f"verified it, {version['left_behind']} left behind, {version['bytes'] / 1e6:.1f} MB by "
        f"{shown.transport}" + (", an alias" if version["aliased"] else "")
    ]
    if plan:
        lines.append(
            f"plan: {plan['copies']} copies of {plan['tensors']} tensors, "
            f"{plan['source_ranks']} to {plan['target_ranks']} ranks, {plan['bytes'] / 1e6:.1f} MB"
        )
    lines += [
        f"engine: {row['encoding']}, {row['wire_bytes'] / 1e6:.1f} MB in {row['launches']} "
        f"launches, group epoch {row['group_epoch']}"
        for row in shown.engines
        if "encoding" in row
    ]
    table = Table("part", "ms", box=None)
    for name, seconds in shown.seconds.items():
        table.add_row(name, f"{seconds * 1e3:.1f}")
    return Group(*(Text(line) for line in lines), table)


def as_json(shown: Shown) -> dict[str, Any]:
    """The same for programs."""
    return {
        "transport": shown.transport,
        "version": shown.version,
        "plan": shown.plan or None,
        "engines": shown.engines,
        "seconds": shown.seconds,
    }
