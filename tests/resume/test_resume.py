"""A run whose processes die goes on exactly where it was. Long: `make resume-equality`."""

import json
import sqlite3

import pytest
from equality import trained_again, unequal_lives, unequal_runs
from lives import Lives, ServiceEndedError, scripted, small

from treadle_experience.fsck import examine, measure

pytestmark = pytest.mark.timeout(300)

SCRIPTED = "tests/resume/scripted.yaml"


@pytest.mark.e2e
@pytest.mark.chaos
def test_steps_that_are_trained_again_are_the_same_to_the_last_bit(tmp_path) -> None:
    # No checkpoint lies between the first step and the last: a kill costs all that was trained.
    every = "trainer.checkpoint_every=12"
    run = Lives(tmp_path / "run", "recipes/calculator.yaml", *small(12), every)

    run.run(kills=2, seed=2)

    assert run.kills == 2
    assert trained_again(run.rows())
    assert unequal_lives(run.rows()) == []


@pytest.mark.e2e
@pytest.mark.chaos
def test_a_scripted_run_that_was_killed_is_the_one_that_was_not(tmp_path) -> None:
    steps = 12
    killed = Lives(tmp_path / "killed", SCRIPTED, *scripted(steps))
    whole = Lives(tmp_path / "whole", SCRIPTED, *scripted(steps))

    killed.run(kills=2, seed=2)
    whole.run()

    assert killed.kills == 2
    assert unequal_runs(killed, whole, steps) == []
    assert unequal_lives(killed.rows()) == []
    # Its bad tasks were handed back and replaced; every step had all of its tasks.
    assert whole.rows("handed_back")
    assert [row["num_episodes"] for row in whole.rows()] == [4 * 4] * steps
    measures = {each.measure: each for each in measure(examine(whole.directory))}
    assert all(each.holds for each in measures.values())
    assert measures["consumed"].value == 4 * 4 * steps
    handed_back = sum(row["quarantined"] for row in whole.rows("handed_back"))
    assert measures["quarantined"].value == handed_back > 0


@pytest.mark.e2e
def test_lost_payloads_are_sampled_again_and_the_run_is_the_same(tmp_path) -> None:
    steps, backend = 8, "trainer.checkpoint_every=8"
    run = Lives(tmp_path / "run", SCRIPTED, f"experience.steps={steps}", backend)
    run.die_at(rows=3)
    before = {row["step"]: row for row in run.rows()}
    ledger = sqlite3.connect(run.directory / "ledger.sqlite")
    with ledger:
        damaged = ledger.execute("UPDATE inline_payload SET payload = x'00'").rowcount
    ledger.close()

    run.run()

    after = {row["step"]: row for row in run.rows()}
    lost = sum(row["lost"] for row in run.rows("handed_back"))
    assert 0 < lost <= damaged
    assert sorted(after) == list(range(1, steps + 1))
    for step, row in before.items():
        assert (after[step]["loss"], after[step]["weights_digest"]) == (
            row["loss"],
            row["weights_digest"],
        )
        assert after[step]["members_digest"] != row["members_digest"]  # other attempts


@pytest.mark.e2e
def test_damaged_checkpoints_are_passed_over_and_where_none_is_left_the_trainer_ends_with_3(
    tmp_path,
) -> None:
    run = Lives(tmp_path / "run", SCRIPTED, "experience.steps=3", "trainer.checkpoint_every=2")
    run.run()
    folders = sorted((run.directory / "checkpoints").glob("step-*"))
    assert [folder.name for folder in folders] == ["step-000002", "step-000003"]

    shard = folders[1] / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    (run.directory / "checkpoints" / "latest").write_text("step-000007\n")
    run.run()

    assert [row["step"] for row in run.rows()] == [1, 2, 3, 3]
    assert unequal_lives(run.rows()) == []
    named = (run.directory / "checkpoints" / "latest").read_text().strip()
    assert named.startswith("step-000003")

    for state in run.directory.glob("checkpoints/step-*/state.json"):
        state.write_text(json.dumps({}))
    with pytest.raises(ServiceEndedError) as raised:
        run.run()
    assert raised.value.statuses == {"trainer": 3}
    log = (run.directory / "logs" / "trainer.log").read_text()
    for folder in run.directory.glob("checkpoints/step-*"):
        assert f"checkpoints/{folder.name}: state.json: expected" in log.splitlines()[-1]
    assert len(list(run.directory.glob("checkpoints/step-*"))) == 2


def test_a_step_that_came_out_otherwise_is_found() -> None:
    row = {"step": 1, "members_digest": "a", "loss": 0.1, "weights_digest": "b"}
    again = row | {"loss": 0.1 + 2**-54}
    other = {**row, "step": 2}

    assert again["loss"] != row["loss"]
    assert unequal_lives([row, other, again, other]) == [1]
    assert unequal_lives([row, other, row]) == []
