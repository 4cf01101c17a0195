import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "one_step.py"


def test_one_step_runs_from_start_parameters_to_the_version_after_them() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", EXAMPLE],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "leased 32 tickets of 4 tasks" in done.stdout
    assert "version 2: the parameters of step 1; the engine serves them" in done.stdout
