"""The bench's proofs, small: members that end in the middle, no response of two versions."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).parents[1] / "benches" / "refit.py"


async def bench(*words: str) -> dict[str, Any]:
    """The lines of a run by measure; asserts that each holds."""
    pytest.importorskip("torch")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), *words, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 200)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    found = {line["measure"]: line for line in map(json.loads, output.splitlines())}
    assert process.returncode == 0, found
    return found


@pytest.mark.parametrize("measure", ["dead_peer_s", "hung_peer_s"])
async def test_who_ends_in_the_middle_of_a_transfer_leaves_whole_survivors(measure: str) -> None:
    found = (await bench("--only", measure))[measure]

    assert found["survivors_whole"]
    assert found["members"] == 2
    assert 0 < found["value"] <= (30 if measure == "dead_peer_s" else 45)


async def test_no_response_mixes_two_versions_while_groups_are_lost_at_every_bucket() -> None:
    found = (await bench("--only", "mixed_version_responses", "--responses", "3000"))[
        "mixed_version_responses"
    ]

    assert found["value"] == 0
    assert found["responses"] >= 3000
    assert min(found["versions_seen"]) >= 15
