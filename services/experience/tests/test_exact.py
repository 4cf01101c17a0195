"""Exact evaluations: only tokens of the parameters that are scored count."""

from dataclasses import replace

import pytest

from treadle_experience.core.errors import StaleAttemptError
from treadle_experience.core.state import EvaluationKey, TaskState


@pytest.fixture
def world(make_world, tools):
    """Step 1 is being scored, as version 2 of two; the start is scored already."""
    rules = tools.evaluation(every=1, share=1.0, limit=2, exact=True)
    world = make_world(evaluation=rules, max_lag=3, retries=1).start()
    for ticket in world.lease(1, 2):
        world.complete(ticket)
    world.train(1)
    world.publish(1)
    return world


def outcome(world):
    return world.state.evaluations[EvaluationKey(1, "greedy")].outcome


def held_out(world, version: int, **how):
    return [ticket for ticket in world.lease(version, **how) if ticket.evaluation]


def test_an_exact_evaluation_runs_on_its_version_only(world) -> None:
    assert held_out(world, 1) == []
    for ticket in held_out(world, 2):
        world.complete(ticket, versions=[2], reward=0.5)

    assert (outcome(world).score, outcome(world).num_failed) == (0.5, 0)
    assert (outcome(world).oldest_version, outcome(world).newest_version) == (2, 2)


def test_a_result_that_spans_versions_is_played_again_and_charges_no_retry(world) -> None:
    first, second = held_out(world, 2)
    world.train(2)
    world.publish(2)

    with pytest.raises(StaleAttemptError):
        world.complete(first, versions=[2, 3])

    episode = world.state.episodes[first.episode_id]
    assert (episode.result, episode.charged, episode.spanned) == (None, 0, 1)
    with pytest.raises(StaleAttemptError):
        world.complete(first, versions=[2, 3])
    (again,) = held_out(world, 2, replica="r2")
    assert (again.episode_id, again.attempt) == (first.episode_id, 2)
    world.complete(again, versions=[2], replica="r2", reward=0.0)
    world.complete(second, versions=[2], reward=1.0)
    assert outcome(world).score == 0.5
    assert world.reload() == world.state


def test_an_episode_that_spans_versions_each_time_has_failed(world) -> None:
    first, second = held_out(world, 2)
    world.complete(second, versions=[2])
    world.train(2)
    world.publish(2)
    with pytest.raises(StaleAttemptError):
        world.complete(first, versions=[2, 3])
    (again,) = held_out(world, 2, replica="r2")

    with pytest.raises(StaleAttemptError):
        world.complete(again, versions=[2, 3], replica="r2")

    assert world.state.tasks[first.task_id].reason == "inexact"
    assert (outcome(world).num_scored, outcome(world).num_failed) == (1, 1)


def test_what_no_engine_serves_any_more_has_failed(world) -> None:
    (running,) = held_out(world, 2, most=1)
    version = world.publish(1)
    world.state.versions[version] = replace(world.state.versions[version], weights_digest="f" * 16)

    world.lease(version, replica="r2")
    world.complete(running, versions=[2], reward=1.0)

    assert (outcome(world).score, outcome(world).num_failed) == (1.0, 1)
    assert world.state.task_counts[TaskState.FILTERED] == 1


def test_another_number_for_the_same_parameters_is_exact(world) -> None:
    version = world.publish(1)
    digest = world.state.versions[2].weights_digest
    world.state.versions[version] = replace(world.state.versions[version], weights_digest=digest)

    tickets = held_out(world, version)
    for ticket in tickets:
        world.complete(ticket, versions=[2, version])

    assert len(tickets) == 2
    assert outcome(world).num_failed == 0
