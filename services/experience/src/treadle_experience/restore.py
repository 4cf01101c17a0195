"""`treadle restore RUN`: brings the server of a run's ledger back to what its archive holds.

For a ledger of durability `fleet` whose server was emptied, or put back to an earlier state: the
experience service refuses it until then. Nothing that was acknowledged is missing afterwards.
"""

import argparse
import sys
from pathlib import Path

from treadle_core.errors import InvalidFieldError, TreadleError
from treadle_experience.ledgers import opened
from treadle_experience.ports import ArchivedLedger
from treadle_runtime.measures import Measure, report

FAILED = 2


def main(argv: list[str]) -> int:
    """Returns 0, or FAILED where the ledger is as it was."""
    parser = argparse.ArgumentParser(prog="treadle restore", description=__doc__)
    parser.add_argument("run", type=Path, help="directory of the run")
    directory: Path = parser.parse_args(argv).run
    try:
        restored = _restore(directory)
    except TreadleError as error:
        sys.stderr.write(f"{directory}: {error}\n")
        return FAILED
    return report([Measure("restored", restored, "transitions")])


def _restore(directory: Path) -> int:
    with opened(directory) as ledger:
        if not isinstance(ledger, ArchivedLedger):
            raise InvalidFieldError("ledger", limit="one with an archive", value=ledger.durability)
        return ledger.restore()
