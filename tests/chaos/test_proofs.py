"""The short forms of `make chaos-smoke` and `make failpoints`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent.parent


def proof(*words: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    measures = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(measure["holds"] for measure in measures)
    return {measure["measure"]: measure["value"] for measure in measures}


def test_every_service_is_killed_or_stopped_once_and_the_run_ends_whole() -> None:
    measures = proof("tools/chaos.py", "--short", "--seed", "3")

    assert (measures["kills"], measures["stops"]) == (2, 2)
    assert (measures["lost"], measures["trained_twice"]) == (0, 0)
    assert (measures["partial_groups"], measures["unknown_versions"]) == (0, 0)


def test_services_that_fail_at_a_sample_of_their_failpoints_end_the_run_whole() -> None:
    measures = proof("tools/failpoints.py", "--short", "--seed", "3")

    assert measures["failures"] == 8
