"""What follows from durable transitions: rows of metrics, and payload files that go."""

import json

import pytest

from treadle_experience.effects import Effects
from treadle_payloads.files import FileStore
from treadle_runtime.tracker import JsonlTracker


@pytest.fixture
def make_effects(tmp_path):
    store = FileStore(tmp_path / "payloads")

    def make(world) -> Effects:
        return Effects(world.state, store, JsonlTracker(tmp_path / "metrics.jsonl"))

    return make


def rows(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def stored(world, effects, ticket, data: bytes):
    reference = effects.store.put(data)
    world.complete(
        ticket, payload=data, sha256=reference.sha256, size=reference.size, inlined=False
    )
    return reference


def test_released_files_go_unless_another_result_has_the_same_bytes(
    make_world, make_effects
) -> None:
    world = make_world(retries=0).start()
    effects = make_effects(world)
    first, failing, other, _ = world.lease(1, 4)
    shared = stored(world, effects, first, b"the same bytes")
    stored(world, effects, other, b"the same bytes")
    world.save()

    world.fail(failing)
    for transition in world.run.take():
        effects.follow(transition)

    assert effects.store.has(shared)


def test_a_released_file_goes(make_world, make_effects) -> None:
    world = make_world(retries=0).start()
    effects = make_effects(world)
    first, failing = world.lease(1, 2)
    reference = stored(world, effects, first, b"its own bytes")

    world.fail(failing)
    for transition in world.run.take():
        effects.follow(transition)

    assert not effects.store.has(reference)


def test_an_evaluation_is_one_row_without_a_score_where_there_is_none(
    make_world, make_effects, tools, tmp_path
) -> None:
    world = make_world(evaluation=tools.evaluation(limit=1), retries=0).start()
    effects = make_effects(world)

    world.fail(world.lease(1)[0])
    for transition in world.run.take():
        effects.follow(transition)

    (row,) = rows(tmp_path)
    assert row.pop("time") > 0
    assert row == {
        "name": "evaluation",
        "evaluation": "greedy",
        "step": 0,
        "num_scored": 0,
        "num_failed": 1,
        "oldest_version": 0,
        "newest_version": 0,
    }


def test_a_score_has_the_standard_error_of_its_mean(
    make_world, make_effects, tools, tmp_path
) -> None:
    world = make_world(evaluation=tools.evaluation(limit=4), retries=0).start()
    effects = make_effects(world)
    failing, *others = world.lease(1)

    world.fail(failing)
    for ticket, reward in zip(others, (0.0, 1.0, 2.0), strict=True):
        world.complete(ticket, reward=reward)
    for transition in world.run.take():
        effects.follow(transition)

    (row,) = rows(tmp_path)
    assert (row["score"], row["num_scored"], row["num_failed"]) == (1.0, 3, 1)
    assert row["std_error"] == pytest.approx(1 / 3**0.5)


def test_counts_are_logged_when_there_is_news(make_world, make_effects, tmp_path) -> None:
    world = make_world().start()
    effects = make_effects(world)

    effects.log_counts({})
    effects.log_counts({})
    world.lease(1, 1)
    effects.log_counts({})

    assert [row.get("episodes_issued", 0) for row in rows(tmp_path)] == [0, 1]
