"""A model that finds no planted fault proves nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
from ledger_model import mutants

pytestmark = pytest.mark.processes

EACH = (*mutants.LEDGER, *mutants.CHECKPOINTS)
HUNT = Path(__file__).parent / "hunt.py"


@pytest.mark.parametrize("name", [each.name for each in EACH if not each.is_rare])
def test_a_planted_fault_is_found(name):
    done = subprocess.run([sys.executable, HUNT, name], capture_output=True, text=True, check=False)

    assert done.returncode == 3, done.stderr
