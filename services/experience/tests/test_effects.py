"""What follows from durable transitions: rows of metrics, and payload files that go."""

import json

import pytest

from treadle_experience.effects import Effects
from treadle_payloads.store import PayloadReference
from treadle_runtime.doorbells.poll import PollDoorbell
from treadle_runtime.tracker import JsonlTracker


@pytest.fixture
def make_effects(tmp_path):
    def make(world) -> Effects:
        return Effects(
            world.state, JsonlTracker(tmp_path / "metrics.jsonl"), PollDoorbell(run_id="run")
        )

    return make


def rows(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_what_a_release_lets_go_is_told_with_its_node_and_its_episode(
    make_world, make_effects
) -> None:
    world = make_world(retries=0, group_size=3).start()
    effects = make_effects(world)
    first, inline, failing = world.lease(1, 3)
    reference = PayloadReference.of(b"tokens")
    stored = {"sha256": reference.sha256, "size": reference.size, "inlined": False}
    world.complete(first, payload=b"tokens", node="unix:/node", **stored)
    world.complete(inline)
    world.save()

    world.fail(failing)
    for transition in world.run.take():
        effects.follow(transition)

    held = effects.released.get_nowait()
    assert (held.reference.sha256, held.reference.node) == (reference.sha256, "unix:/node")
    assert held.holder == first.episode_id
    assert effects.released.empty()


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


def test_a_score_is_told_although_what_it_is_of_was_forgotten_meanwhile(
    make_world, make_effects, tools, tmp_path
) -> None:
    world = make_world(kept_tasks=1, evaluation=tools.evaluation(every=3)).start()
    effects = make_effects(world)
    for ticket in world.lease(1):
        world.complete(ticket)
    for step in range(1, 20):
        world.train(step)
        world.checkpoint(step)
        world.publish(step)

    for transition in world.save():
        effects.follow(transition)

    scores = {row["step"]: row for row in rows(tmp_path) if row["name"] == "evaluation"}
    assert scores.keys() >= {0, 3, 6, 9, 12, 15}
    assert "std_error" in scores[0]
    assert "std_error" not in scores[3]


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
