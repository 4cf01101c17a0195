"""What a run trained on, written down for others."""

import contextlib
import json
from dataclasses import replace

import pytest

from treadle_core.media import Medium
from treadle_experience import export
from treadle_experience.adapters.sqlite import FILE_NAME, SqliteLedger
from treadle_experience.recorded import recorded
from treadle_payloads.files import FileStore
from treadle_payloads.media import reference_of


@pytest.fixture
def write(tmp_path):
    """Stores a world's journal as a run's ledger; returns the run's directory."""

    def store(world):
        with contextlib.closing(SqliteLedger(tmp_path / FILE_NAME)) as ledger:
            epoch = ledger.acquire(world.rules.run_id)
            ledger.append(world.save(), epoch)
        return tmp_path

    return store


def exported(directory, *words):
    """Exit status of the command, its head, and the rows of each step's file."""
    out = directory / "out"
    status = export.main([str(directory), str(out), *words])
    head = json.loads((out / export.FILE_NAME).read_text())
    steps = {
        number: list(map(json.loads, (out / f"steps/{number:06d}.jsonl").read_text().splitlines()))
        for number in head["steps"]
    }
    return status, head, steps


def test_steps_are_written_in_order_with_what_was_reported_and_their_payloads(
    make_world, write, capsys
) -> None:
    world = make_world(max_lag=3).start()
    trained = [world.train(step) for step in (1, 2)]

    directory = write(world)
    status, head, steps = exported(directory)

    assert (status, head["run_id"], head["steps"], head["missing"]) == (0, "run", [1, 2], {})
    for number, (told, *tasks) in steps.items():
        assert told == {"step": number, "last": False, "metrics": {"loss": 0.5}}
        assert [task["task_id"] for task in tasks] == trained[number - 1]
        for episode in (each for task in tasks for each in task["episodes"]):
            sha256 = episode["result"]["payload"]["sha256"]
            data = (directory / "out/payloads" / sha256[:2] / sha256).read_bytes()
            assert data.decode() == f"{episode['episode_id']}/1"
    rows = map(json.loads, capsys.readouterr().out.splitlines())
    measures = {row["measure"]: row["value"] for row in rows}
    assert (measures["exported_groups"], measures["exported_episodes"]) == (4, 8)


def test_media_are_exported_once_beside_the_payloads_and_a_step_without_them_is_named(
    make_world, write
) -> None:
    world = make_world(max_lag=3).start()
    cat, dog = (Medium.of(data, "image/png") for data in (b"cat", b"dog"))
    for step, medium in ((1, cat), (2, dog)):
        for ticket in world.lease(1, 4):
            world.complete(ticket, media=(replace(medium, node="unix:/node", epoch=3),))
        world.claim(step)
        world.report(step)
    directory = write(world)
    FileStore(directory / "payloads").put(b"cat")

    status, head, steps = exported(directory)

    assert (status, head["steps"], list(head["missing"])) == (1, [1], ["2"])
    assert dog.sha256 in head["missing"]["2"]
    out = FileStore(directory / "out" / "payloads")
    assert out.get(reference_of(cat)) == b"cat"
    told = [each["result"]["media"] for task in steps[1][1:] for each in task["episodes"]]
    assert told == [[{"sha256": cat.sha256, "size": "3", "media_type": "image/png"}]] * 4


@pytest.mark.parametrize("keep", [False, True])
def test_a_step_whose_payloads_were_released_is_named_unless_the_recipe_keeps_them(
    make_world, write, capsys, keep
) -> None:
    world = make_world(max_lag=0, keep_payloads=keep).start()
    for step in (1, 2, 3):
        world.train(step)
        world.publish(step)
        world.checkpoint(step)

    status, head, _ = exported(write(world))

    if keep:
        assert (status, head["steps"], head["missing"]) == (0, [1, 2, 3], {})
    else:
        assert (status, head["steps"], list(head["missing"])) == (1, [3], ["1", "2"])
        assert "is not in the ledger" in head["missing"]["1"]
        assert "step 1: episode" in capsys.readouterr().err


def test_only_the_lineage_is_exported_and_a_step_that_was_trained_again_once(
    make_world,
) -> None:
    world = make_world(max_lag=3).start()
    digest = world.state.head().digest
    for step in (1, 2):
        world.train(step)
    world.acquire("another", digest)
    assert recorded(world.save()).steps == {}
    world.claim(1)
    world.report(1, loss=0.25)

    found = recorded(world.save())

    assert list(found.steps) == [1]
    assert found.steps[1].metrics == {"loss": 0.25}
    assert len(found.ready) == 2 + 4  # what stands claimed again, and what was ahead


def test_whole_groups_that_were_not_trained_on_are_exported_on_demand(make_world, write) -> None:
    world = make_world(max_lag=3).start()
    world.train(1)
    directory = write(world)
    exported(directory)
    assert not (directory / "out" / "ready.jsonl").exists()

    exported(directory, "--ready")

    rows = (directory / "out" / "ready.jsonl").read_text().splitlines()
    assert [json.loads(row)["task_id"] for row in rows] == [f"t{n:06d}" for n in range(3, 9)]


def test_a_directory_without_a_run_is_refused(tmp_path, capsys) -> None:
    assert export.main([str(tmp_path / "none"), str(tmp_path / "out")]) == export.UNREADABLE
    assert "no ledger" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
