"""A run on two ranks, one of which dies; and a run that is trained again from what it recorded."""

import filecmp

import psutil
import pytest
from e2e_harness import measures, treadle

pytestmark = pytest.mark.e2e


def test_a_run_goes_on_when_one_of_its_ranks_is_killed(make_run) -> None:
    run = make_run("trainer.ranks=2", "run.inline_bytes=0")
    run.start()
    run.wait_until(lambda: any(row["step"] >= 2 for row in run.rows("trainer", "step")))
    leader = next(
        row["pid"] for row in run.rows("supervisor", "start") if row["service"] == "trainer"
    )
    follower, *others = psutil.Process(leader).children()
    assert not others

    follower.kill()
    run.finish()

    deaths = [row for row in run.rows("supervisor", "death") if row["service"] == "trainer"]
    assert len(deaths) == 1
    assert {row["step"] for row in run.rows("trainer", "step")} == set(range(1, 7))
    run.fsck()
    assert not psutil.pid_exists(follower.pid)


def test_what_a_run_recorded_trains_to_the_same_parameters_bit_by_bit(make_run, tmp_path) -> None:
    run = make_run("experience.keep_payloads=true", "run.inline_bytes=0")
    run.start()
    run.finish()

    found = measures(treadle("export", str(run.directory), str(tmp_path / "out")).stdout)
    assert (found["exported_steps"], found["exported_episodes"]) == (6, 96)
    words = ["replay", str(run.directory / "recipe.yaml"), "--from", str(tmp_path / "out")]
    policy = tmp_path / "policy"
    told = measures(treadle(*words, "--equal", "--output", str(policy)).stdout)

    assert told == {"replayed_steps": 6, "unequal_steps": 0}
    last = run.directory / "checkpoints" / "step-000006"
    assert filecmp.cmp(policy / "model.safetensors", last / "model.safetensors", shallow=False)
