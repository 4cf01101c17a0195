"""A doorbell that is connected and carries nothing: all goes on without, slower."""

import asyncio
import subprocess

import pytest
from planted import planted

from treadle_runtime.doorbell import Topic, ask_until
from treadle_runtime.doorbells.memory import MemoryDoorbell

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

FOUND_S = 5.0
"""After so long what a lost ring left is found."""
ENDS_S = 150
"""A few steps of three questions each, of which every one waits for a sweep."""
UNHEARD = {
    "module": "treadle_runtime.doorbells.nats",
    "before": "self._near.ring(self._topics[message.subject])",
    "after": "pass",
}
"""Every message is lost on its way."""


async def test_what_a_lost_ring_left_is_found_by_the_sweep() -> None:
    clock = asyncio.get_running_loop().time
    asked: list[float] = []

    async def ask(_: float) -> int:
        asked.append(clock())
        return len(asked)

    bell = MemoryDoorbell(run_id="run", hears=[Topic.BATCHES])
    answer = await ask_until(bell, Topic.BATCHES, ask, lambda n: n == 2, wait_s=3 * FOUND_S)

    assert answer == 2
    assert asked[1] - asked[0] < 1.5 * FOUND_S, "the sweep is late"


@pytest.mark.e2e
def test_a_run_goes_on_although_no_ring_is_heard(make_run, monkeypatch) -> None:
    for name, value in planted(UNHEARD).items():
        monkeypatch.setenv(name, value)
    run = make_run("experience.steps=3", "experience.evaluation=null", "run.doorbell={name: nats}")
    run.start()

    try:
        run.finish(timeout_s=ENDS_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"no end within {ENDS_S} s\n{run.logs()}")

    assert run.rows("experience", "counts")[-1]["rings_sent"] > 0
    assert run.fsck()["lost"] == 0
