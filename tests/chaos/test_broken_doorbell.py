"""A run whose NATS stands still, dies and forgets goes on, and its doorbells come back."""

import os
import shutil
import signal

import pytest
from small_run import SmallRun, account

pytestmark = [pytest.mark.chaos, pytest.mark.e2e, pytest.mark.timeout(400)]

STEPS = 14


@pytest.fixture
def run(tmp_path):
    small = SmallRun(tmp_path / "run", f"experience.steps={STEPS}", "run.doorbell={name: nats}")
    yield small
    small.kill()


def test_a_broker_that_stands_still_dies_and_forgets_costs_time_only(run) -> None:
    run.start()
    assert run.wait_for("step 2", lambda: run.step() >= 2, timeout_s=120)

    stopped = run.victim("nats")
    os.kill(stopped, signal.SIGSTOP)
    at = run.step()
    assert run.wait_for("steps without a bell", lambda: run.step() >= at + 3, timeout_s=120)

    shutil.rmtree(run.directory / "servers" / "nats" / "jetstream")
    os.kill(stopped, signal.SIGKILL)
    at = run.step()
    assert run.wait_for("steps with a new one", lambda: run.step() >= at + 3, timeout_s=120)
    run.finish(timeout_s=120)

    failed = [measure for measure in account(run) if not measure.holds]
    assert not failed
    assert [row["signal"] for row in run.rows("supervisor", "death")] == ["SIGKILL"]
    counts = run.rows("experience", "counts")
    assert counts[-1]["rings_failed"] >= 1
    heard = [row.get("rings_heard", 0) for row in run.rows("rollout", "rollout")]
    assert heard[-1] > 0
