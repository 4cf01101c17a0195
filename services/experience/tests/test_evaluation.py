"""Evaluations: when they are due, who runs them, what they say."""

import pytest

from treadle_experience.core import steps
from treadle_experience.core.errors import TaskSourceError
from treadle_experience.core.state import EvaluationKey, TaskState


def outcome_of(world, step: int):
    return world.state.evaluations[EvaluationKey(step, "greedy")].outcome


def score(world, version: int, *, rewards, step: int) -> None:
    leased = [t for t in world.lease(version) if t.evaluation]
    for ticket, reward in zip(leased, rewards, strict=True):
        world.complete(ticket, versions=[version], reward=reward)
    assert outcome_of(world, step) is not None


def test_the_start_is_scored_before_any_training_task_is_opened(make_world, tools) -> None:
    world = make_world(evaluation=tools.evaluation()).start()

    leased = world.lease(1)
    blocked = world.lease(1)
    for ticket in leased:
        world.complete(ticket, reward=0.5)

    assert [t.evaluation for t in leased] == ["greedy"] * 3
    assert leased[0].task_id == "e-greedy-000000-000001"
    assert [t.spec for t in leased] == [{"held_out": i} for i in range(3)]
    assert {t.sampling.temperature for t in leased} == {0.0}
    assert blocked == []
    assert outcome_of(world, 0).score == 0.5
    assert {t.evaluation for t in world.lease(1)} == {""}


def test_evaluation_takes_its_share_of_slots_and_no_place_in_the_window(make_world, tools) -> None:
    world = make_world(max_lag=0, evaluation=tools.evaluation(share=0.3, limit=9)).start()
    score(world, 1, rewards=[1.0] * 9, step=0)
    for step in (1, 2):
        world.train(step)
        world.publish(step)

    leased = world.lease(3, 6, slots=5)
    more = world.lease(3, 1, slots=5)

    assert [bool(t.evaluation) for t in leased] == [True, True, False, False, False, False]
    assert more == []


def test_an_evaluation_waits_for_a_replica_that_serves_its_version(make_world, tools) -> None:
    world = make_world(evaluation=tools.evaluation(share=1.0)).start()
    score(world, 1, rewards=[1.0] * 3, step=0)
    for step in (1, 2):
        world.train(step)
        world.publish(step)

    assert not any(t.evaluation for t in world.lease(2, replica="old"))
    assert sum(bool(t.evaluation) for t in world.lease(3, replica="new")) == 3


def test_after_a_restore_an_older_step_under_a_newer_number_is_not_scored(
    make_world, tools
) -> None:
    world = make_world(evaluation=tools.evaluation(share=1.0), max_lag=3).start()
    score(world, 1, rewards=[1.0] * 3, step=0)
    start = world.state.head().digest
    for step in (1, 2):
        world.train(step)
        world.publish(step)

    world.acquire("second", start)
    restored = world.publish(0)
    too_early = [t for t in world.lease(restored) if t.evaluation]
    for step in (1, 2):
        world.claim(step)
        world.report(step)
    again = world.publish(2)
    score(world, again, rewards=[0.0, 1.0, 1.0], step=2)

    assert too_early == []
    assert outcome_of(world, 2).score == pytest.approx(2 / 3)
    assert len(world.state.evaluations) == 2


def test_failed_and_unrewarded_episodes_are_counted_and_never_scored(make_world, tools) -> None:
    world = make_world(evaluation=tools.evaluation(), retries=0).start()
    failed, unrewarded, scored = world.lease(1)

    world.fail(failed)
    world.complete(unrewarded, reward=None)
    world.complete(scored, reward=0.25)

    outcome = outcome_of(world, 0)
    assert (outcome.score, outcome.num_scored, outcome.num_failed) == (0.25, 1, 2)
    assert world.state.task_counts[TaskState.SCORED] == 2
    assert world.account().places["scored"] == {unrewarded.episode_id, scored.episode_id}


def test_an_evaluation_without_a_score_has_none(make_world, tools) -> None:
    world = make_world(evaluation=tools.evaluation(), retries=0).start()

    for ticket in world.lease(1):
        world.fail(ticket)

    outcome = outcome_of(world, 0)
    assert (outcome.score, outcome.num_failed, outcome.oldest_version) == (None, 3, 0)


def test_a_score_may_span_versions_and_says_so(make_world, tools) -> None:
    world = make_world(evaluation=tools.evaluation(share=1.0), max_lag=3).start()
    score(world, 1, rewards=[1.0] * 3, step=0)
    for step in (1, 2):
        world.train(step)
        world.publish(step)
    first, *rest = [t for t in world.lease(3) if t.evaluation]
    world.complete(first, versions=[3])
    world.report(3) if world.claim(3).tasks else None
    world.publish(2)

    for ticket in rest:
        world.complete(ticket, versions=[3, 4])

    outcome = outcome_of(world, 2)
    assert (outcome.oldest_version, outcome.newest_version) == (3, 4)


def test_the_last_step_is_scored_before_the_run_is_complete(make_world, tools) -> None:
    world = make_world(evaluation=tools.evaluation(every=100, share=0.1), steps=1).start()
    score(world, 1, rewards=[0.0] * 3, step=0)
    world.train(1)
    world.checkpoint(1)
    before_publication = steps.is_complete(world.run)
    version = world.publish(1)
    before_scores = steps.is_complete(world.run)

    score(world, version, rewards=[1.0] * 3, step=1)

    assert (before_publication, before_scores) == (False, False)
    assert steps.is_complete(world.run)


def test_a_run_of_no_steps_scores_its_start_and_is_complete(make_world, tools) -> None:
    world = make_world(evaluation=tools.evaluation(share=0.1), steps=0).start()

    claim = world.claim(1)
    before_scores = steps.is_complete(world.run)
    score(world, 1, rewards=[1.0] * 3, step=0)

    assert claim.complete
    assert not world.lease(1)
    assert (before_scores, steps.is_complete(world.run)) == (False, True)


def test_a_last_step_that_is_known_late_is_scored_from_the_version_that_is_there(
    make_world, tools
) -> None:
    world = make_world(evaluation=tools.evaluation(every=100), num_tasks=3, retries=0).start()
    score(world, 1, rewards=[0.0] * 3, step=0)
    leased = world.lease(1)
    for ticket in leased[:-1]:
        world.complete(ticket)
    world.claim(1)
    world.report(1)
    world.checkpoint(1)
    version = world.publish(1)
    world.fail(leased[-1])

    world.claim(2)
    score(world, version, rewards=[1.0] * 3, step=1)

    assert steps.is_complete(world.run)


def test_a_set_without_tasks_is_an_error_that_names_it(make_world, tools) -> None:
    world = make_world(evaluation=tools.evaluation())
    world.run.sources = {**world.run.sources, "greedy": lambda cursor: None}

    with pytest.raises(TaskSourceError, match="greedy"):
        world.start()


@pytest.mark.parametrize(
    "spec",
    [pytest.param({"a": {1, 2}}, id="no-json"), pytest.param({"a": float("nan")}, id="nan")],
)
def test_a_source_that_gives_no_json_is_named_with_its_cursor(make_world, spec) -> None:
    world = make_world().start()
    world.run.sources = {"": lambda cursor: spec}

    with pytest.raises(TaskSourceError, match="cursor 0"):
        world.lease(1)
