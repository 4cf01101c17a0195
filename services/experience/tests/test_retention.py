"""What a run forgets, and that nothing of it is missed."""

import pytest

from treadle_experience.core import versions
from treadle_experience.core.audit import reconcile
from treadle_experience.core.condensation import condense
from treadle_experience.core.errors import UnknownCheckpointError, UnknownEpisodeError
from treadle_experience.core.run import Run
from treadle_experience.core.state import EpisodeState, EvaluationKey, TaskState
from treadle_experience.core.transitions import HistoryForgotten

KEPT = 5


@pytest.fixture
def world(make_world):
    """A run that keeps few records."""
    return make_world(kept_tasks=KEPT).start()


def advance(world, first: int, last: int) -> None:
    for step in range(first, last + 1):
        world.train(step)
        world.checkpoint(step)
        world.publish(step)


def sizes(state) -> dict[str, int]:
    names = (
        *("tasks", "episodes", "steps", "claimed_through", "checkpoints", "lineage"),
        *("versions", "version_requests", "evaluations", "finished", "acquisitions"),
    )
    return {name: len(getattr(state, name)) for name in names}


def test_a_state_does_not_grow_with_its_age(world) -> None:
    advance(world, 1, 30)
    middle = sizes(world.state)
    advance(world, 31, 90)

    late = sizes(world.state)

    assert all(late[name] <= middle[name] + 2 * KEPT for name in late), (middle, late)
    assert world.state.task_counts[TaskState.CONSUMED] == 90 * 2
    assert world.reload() == world.state


def test_a_young_run_forgets_nothing(make_world) -> None:
    world = make_world().start()
    advance(world, 1, 20)

    assert not [each for each in world.save() if isinstance(each, HistoryForgotten)]


def test_what_is_forgotten_is_accounted_for(world) -> None:
    advance(world, 1, 20)
    head = condense(world.state)

    whole, short = world.account(), reconcile(head, world.state)

    assert whole.unaccounted() == short.unaccounted() == 0
    assert whole.num_acknowledged() == short.num_acknowledged() == len(whole.acknowledged)
    assert whole.num_in("consumed") == short.num_in("consumed") > len(short.places["consumed"])
    for account in (whole, short):
        assert not account.missing() | account.double_counted() | account.trained_twice()


def test_a_result_that_the_counts_lost_shows(world) -> None:
    advance(world, 1, 20)
    world.state.forgotten_results[TaskState.CONSUMED] -= 1

    account = reconcile(condense(world.state), world.state)

    assert account.unaccounted() == 1


def test_a_late_duplicate_of_a_forgotten_episode_is_refused(world) -> None:
    ticket = world.lease(1, 1)[0]
    world.complete(ticket)
    advance(world, 1, 20)

    with pytest.raises(UnknownEpisodeError, match="settled"):
        world.complete(ticket)


def test_a_forgotten_version_gets_no_ticket_and_no_result_in(world) -> None:
    advance(world, 1, 20)
    ticket = world.lease(world.state.newest_version, 1)[0]
    assert world.state.forgotten_version > 1

    assert world.lease(1) == []
    with pytest.raises(versions.VersionEndedError):
        versions.abort(world.run, number=1, message="")
    assert world.state.episodes[ticket.episode_id].state is EpisodeState.ISSUED


def test_every_checkpoint_that_can_be_restored_still_can(world) -> None:
    advance(world, 1, 20)
    newest, older = world.state.restorable()

    assert world.acquire("second", older.digest) == older.step
    assert world.account().unaccounted() == 0
    for step in range(older.step + 1, newest.step + 1):
        assert world.claim(step).tasks
        world.report(step)
    world.checkpoint(newest.step, "again")
    advance(world, newest.step + 1, newest.step + 9)
    assert world.reload() == world.state
    with pytest.raises(UnknownCheckpointError):
        world.acquire("third", older.digest)


def test_an_acquisition_is_remembered_as_long_as_its_checkpoint(world) -> None:
    assert world.acquire("trainer") == 0
    advance(world, 1, 3)
    digest = world.state.head().digest
    world.acquire("second", digest)
    epoch = world.epoch
    advance(world, 4, 4)
    assert world.acquire("second", digest) == 3
    assert world.epoch == epoch

    advance(world, 5, 20)

    with pytest.raises(UnknownCheckpointError):
        world.acquire("second", digest)


def test_payloads_of_what_is_forgotten_are_released(make_world, tools) -> None:
    world = make_world(kept_tasks=KEPT, evaluation=tools.evaluation(every=3)).start()
    for ticket in world.lease(1):
        world.complete(ticket)
    for step in range(1, 30):
        world.train(step)
        world.checkpoint(step)
        world.publish(step)

    held = world.state
    kept = {key.step for key in held.evaluations}

    assert 0 in kept
    assert EvaluationKey(3, "greedy") not in held.evaluations
    assert len(kept) < 9
    forgotten = [
        t for each in world.save() if isinstance(each, HistoryForgotten) for t in each.task_ids
    ]
    assert any(task_id.startswith("e-") for task_id in forgotten)
    assert held.payload_bytes == sum(
        episode.result.size
        for task in held.tasks.values()
        for episode in task.episodes
        if task.evaluation is None and episode.result and not episode.released
    )


def test_a_run_that_was_condensed_goes_on_as_it_would_have(world) -> None:
    advance(world, 1, 12)
    twin = Run(world.rules, world.run.sources)
    twin.load(condense(world.state))
    assert twin.state == world.state

    world.save()
    world.run = twin
    advance(world, 13, 30)

    assert world.reload() == world.state
