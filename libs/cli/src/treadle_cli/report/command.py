"""`treadle report RUN`: writes one HTML file that says how a run went.

Reads the run's record, its metrics and its transcripts, while it goes on or after. The file asks
nobody for anything and needs no script to be read.
"""

import argparse
import sys
from pathlib import Path

from treadle_cli import record
from treadle_cli.report import curves, transcripts
from treadle_cli.report.page import page
from treadle_cli.rows import RunTail
from treadle_core.errors import TreadleError

FILE_NAME = "report.html"
UNREADABLE = 2


def main(argv: list[str]) -> int:
    """Returns 0, or UNREADABLE where there is no run."""
    parser = argparse.ArgumentParser(prog="treadle report", description=__doc__)
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("-o", "--output", type=Path, help=f"default: RUN/{FILE_NAME}")
    args = parser.parse_args(argv)
    try:
        print(write(args.run, args.output))
    except TreadleError as error:
        sys.stderr.write(f"{args.run}: {error}\n")
        return UNREADABLE
    return 0


def write(run: Path, output: Path | None = None) -> Path:
    """Writes the report of the run; returns where it lies."""
    kept = record.read(run)
    rows = RunTail(run).rows()
    scored = curves.of(rows, "experience", "evaluation")
    pairs = transcripts.read(run, scored[0]["evaluation"]) if scored else []
    path = output or run / FILE_NAME
    path.write_text(page(kept, rows, pairs), encoding="utf-8")
    return path
