"""The command, its services and their end, as a user sees them."""

import json
import os
import signal

import pytest
from e2e_harness import PATIENCE_S, ROOT

from treadle_runtime import plugins

pytestmark = pytest.mark.e2e


def steps_trained(run) -> int:
    return len({row["step"] for row in run.rows("trainer", "step")})


def assert_whole(run, *, steps: int) -> None:
    """The run is complete, and the ledger's sums add up."""
    assert steps_trained(run) == steps
    measures = run.fsck()
    assert (measures["lost"], measures["trained_twice"]) == (0, 0)
    assert measures["pending"] == 0
    assert measures["consumed"] == steps * 4 * 4
    scored = {(row["evaluation"], row["step"]) for row in run.rows("experience", "evaluation")}
    assert {("greedy", 0), ("sampled", 0), ("greedy", steps), ("sampled", steps)} <= scored


def test_trains_to_the_end_within_the_lag_bound_and_reconciles(make_run) -> None:
    run = make_run("run.trackers=[{name: tensorboard}]")
    run.start()

    printed = run.finish()

    assert "step    6/6" in printed
    assert "held-out greedy" in printed
    assert_whole(run, steps=6)
    assert f"report in {run.directory}/report.html" in printed
    assert "256 tasks, scored at steps 0 and 6" in (run.directory / "report.html").read_text()
    written = {path.parent.name for path in run.directory.glob("tensorboard/*/events*")}
    assert written == {"experience", "refit", "rollout", "trainer"}
    assert max(row["lag_max"] for row in run.rows("trainer", "step")) <= 4
    assert run.service_pids() == {}


def test_max_lag_0_is_strictly_on_policy(make_run) -> None:
    run = make_run("experience.max_lag=0")
    run.start()

    run.finish()

    assert [row["lag_max"] for row in run.rows("trainer", "step")] == [0] * 6


@pytest.mark.chaos
def test_services_end_by_themselves_when_the_command_is_killed_and_the_run_goes_on(
    make_run,
) -> None:
    run = make_run()
    command = run.start()
    run.wait_until(lambda: steps_trained(run) >= 3)

    command.send_signal(signal.SIGKILL)
    command.communicate()
    run.wait_until_no_service_is_left()
    run.start()
    run.finish()

    assert_whole(run, steps=6)


@pytest.mark.chaos
@pytest.mark.parametrize("killed_at", [1, 3, 5])
def test_a_run_whose_processes_were_all_killed_goes_on_to_its_end(make_run, killed_at) -> None:
    run = make_run()
    run.start()
    run.wait_until(lambda: steps_trained(run) >= killed_at)

    run.kill_all()
    run.start()
    run.finish()

    assert_whole(run, steps=6)


@pytest.mark.chaos
@pytest.mark.parametrize("name", ["experience", "rollout", "trainer", "refit"])
def test_a_killed_service_is_started_again_and_nothing_is_lost(make_run, name) -> None:
    run = make_run()
    run.start()
    run.wait_until(lambda: steps_trained(run) >= 2)

    os.kill(run.service_pids()[name], signal.SIGKILL)

    printed = run.finish()
    assert f"{name} ended with signal SIGKILL" in printed
    assert_whole(run, steps=6)


@pytest.mark.chaos
def test_a_service_that_stands_still_is_killed_and_the_run_goes_on(make_run) -> None:
    run = make_run("run.hung_s=8")
    run.start()
    run.wait_until(lambda: steps_trained(run) >= 2)

    os.kill(run.service_pids()["trainer"], signal.SIGSTOP)

    printed = run.finish()
    assert "trainer ended with signal SIGKILL because it hung" in printed
    deaths = [(row["service"], row["hung"]) for row in run.rows("supervisor", "death")]
    assert deaths == [("trainer", 1)], run.rows("supervisor", "death")
    assert_whole(run, steps=6)


def test_ctrl_c_drains_and_the_run_goes_on_from_there(make_run) -> None:
    run = make_run()
    command = run.start()
    run.wait_until(lambda: steps_trained(run) >= 2)

    command.send_signal(signal.SIGINT)
    out, _ = command.communicate(timeout=PATIENCE_S)

    assert command.returncode == 130, out
    assert run.service_pids() == {}
    trained = steps_trained(run)
    run.start()
    run.finish()
    assert_whole(run, steps=6)
    # What was drained was committed: no step was trained a second time.
    assert len(run.rows("trainer", "step")) == 6
    assert trained >= 2


def test_a_data_set_that_ends_makes_a_last_shorter_step(make_run, tmp_path) -> None:
    tasks = plugins.load(
        "treadle.task_sources", f"{ROOT}/examples/calculator/tasks.py:CalculatorTasks"
    )
    lines = [json.dumps(tasks(split="train").read(cursor)) for cursor in range(10)]
    data = tmp_path / "tasks.jsonl"
    data.write_text("\n".join(lines))
    run = make_run("experience.steps=100", f"experience.source={{name: jsonl, path: {data}}}")
    run.start()

    run.finish()

    assert [row["num_episodes"] for row in run.rows("trainer", "step")] == [16, 16, 8]
    measures = run.fsck()
    assert (measures["lost"], measures["consumed"]) == (0, 40)
