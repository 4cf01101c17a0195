"""Attempts: retries, fencing, duplicates, leases."""

import pytest

from treadle_experience.core import tickets
from treadle_experience.core.errors import (
    ResultConflictError,
    StaleAttemptError,
    UnknownEpisodeError,
    UnknownVersionError,
)
from treadle_experience.core.leases import Leases
from treadle_experience.core.state import Attempt, EpisodeState, TaskState


def test_a_task_is_ready_when_all_members_are_done(make_world) -> None:
    world = make_world().start()
    first, second = world.lease(1, 2)

    world.complete(first)
    half = world.state.tasks[first.task_id].state
    world.complete(second)

    assert (half, world.state.tasks[first.task_id].state) == (TaskState.OPEN, TaskState.READY)


def test_a_replica_that_serves_nothing_gets_no_ticket(make_world) -> None:
    world = make_world().start()

    assert world.lease(0, 1) == []


def test_a_repeated_result_is_a_duplicate_and_another_one_a_conflict(make_world) -> None:
    world = make_world().start()
    ticket = world.lease(1, 1)[0]
    world.complete(ticket, payload=b"one")
    position = world.state.position

    assert world.complete(ticket, payload=b"one") is True
    with pytest.raises(ResultConflictError) as caught:
        world.complete(ticket, payload=b"two")

    assert caught.value.field == "payload.sha256"
    assert world.state.position == position


@pytest.mark.parametrize("end", ["fail", "expire", "return"])
def test_a_late_result_of_an_ended_attempt_is_fenced(make_world, tools, end) -> None:
    world = make_world().start()
    ticket = world.lease(1, 1)[0]
    if end == "fail":
        world.fail(ticket)
    elif end == "expire":
        tickets.expire(world.run, [tools.attempt(ticket)])
    else:
        tickets.give_back(world.run, replica_id="r1", attempts=[tools.attempt(ticket)])

    with pytest.raises(StaleAttemptError):
        world.complete(ticket)
    again = world.lease(1, 1)[0]
    with pytest.raises(StaleAttemptError):
        world.complete(ticket)

    assert (again.episode_id, again.attempt) == (ticket.episode_id, 2)
    assert world.complete(again) is False


def test_a_result_of_a_replica_that_does_not_hold_the_lease_is_fenced(make_world) -> None:
    world = make_world().start()
    ticket = world.lease(1, 1)[0]

    with pytest.raises(StaleAttemptError):
        world.complete(ticket, replica="r2")


@pytest.mark.parametrize("attempt", [Attempt("0" * 32, 1), None], ids=["episode", "attempt"])
def test_a_result_that_was_never_asked_for_is_unknown(make_world, attempt) -> None:
    world = make_world().start()
    ticket = world.lease(1, 1)[0]

    with pytest.raises(UnknownEpisodeError):
        tickets.find(world.state, attempt or Attempt(ticket.episode_id, 2))


def test_a_token_of_an_unregistered_version_is_refused(make_world) -> None:
    world = make_world().start()
    ticket = world.lease(1, 1)[0]

    with pytest.raises(UnknownVersionError, match="version 2 is not registered"):
        world.complete(ticket, versions=[1, 2])

    assert world.state.episodes[ticket.episode_id].state is EpisodeState.ISSUED


def test_spent_retries_filter_the_whole_task(make_world, tools) -> None:
    world = make_world(retries=1).start()
    first, second = world.lease(1, 2)
    done = world.lease(1, 2)
    world.complete(second)

    assert world.fail(first) is True
    again = world.lease(1, 1)[0]
    assert world.fail(again) is False

    task = world.state.tasks[first.task_id]
    assert (task.state, task.reason) == (TaskState.FILTERED, "incomplete_group")
    assert task.episodes[1].inline is None
    assert world.state.failures == {"environment": 2}
    assert world.account().places["filtered"] == {second.episode_id}
    assert done[0].task_id != task.task_id


def test_filtering_revokes_what_still_runs(make_world) -> None:
    world = make_world(retries=0).start()
    first, second = world.lease(1, 2)

    world.fail(first)
    held, revoked = tickets.renew(
        world.run,
        replica_id="r1",
        served_version=1,
        attempts=[Attempt(second.episode_id, 1)],
    )

    assert (held, revoked) == ([], [Attempt(second.episode_id, 1)])
    with pytest.raises(StaleAttemptError):
        world.complete(second)


def test_two_members_that_expire_together_end_their_task_once(make_world, tools) -> None:
    world = make_world(retries=0).start()
    pair = world.lease(1, 2)

    tickets.expire(world.run, [tools.attempt(ticket) for ticket in pair])

    assert world.state.task_counts[TaskState.FILTERED] == 1
    assert world.state.running == {}


def test_returned_tickets_are_not_charged(make_world, tools) -> None:
    world = make_world(retries=0).start()

    for attempt in range(1, 5):
        ticket = world.lease(1, 1)[0]
        assert ticket.attempt == attempt
        tickets.give_back(world.run, replica_id="r1", attempts=[tools.attempt(ticket)])

    assert world.state.failures == {}


def test_a_failure_reported_twice_is_answered_as_the_first_time(make_world) -> None:
    world = make_world(retries=1).start()
    ticket = world.lease(1, 1)[0]

    assert [world.fail(ticket), world.fail(ticket)] == [True, True]
    again = world.lease(1, 1)[0]
    assert [world.fail(again), world.fail(again)] == [False, False]

    assert world.state.failures == {"environment": 2}


def test_leases_end_unless_they_are_renewed_and_never_outlive_the_deadline(
    make_world, tools
) -> None:
    world = make_world().start()
    leases = Leases(lease_s=10, deadline_s=60)
    world.save()
    kept, lost = world.lease(1, 2)
    leases.follow(world.run.take(), now=100.0)

    leases.renew(tools.attempt(kept), now=109.0)

    assert leases.due(world.state, now=109.9) == []
    assert leases.due(world.state, now=110.0) == [tools.attempt(lost)]
    leases.renew(tools.attempt(kept), now=165.0)
    assert tools.attempt(kept) in leases.due(world.state, now=170.0)


def test_a_loaded_state_gives_every_issued_episode_a_fresh_lease(make_world, tools) -> None:
    world = make_world().start()
    ticket = world.lease(1, 1)[0]
    leases = Leases(lease_s=10, deadline_s=60)

    leases.start(world.reload(), now=500.0)

    assert leases.due(world.state, now=509.0) == []
    assert leases.due(world.state, now=510.0) == [tools.attempt(ticket)]


def test_time_in_which_the_process_stood_still_ends_no_lease(make_world) -> None:
    world = make_world().start()
    world.lease(1, 1)
    leases = Leases(lease_s=10, deadline_s=60)
    leases.start(world.state, now=0.0)

    leases.forgive(30.0)

    assert leases.due(world.state, now=31.0) == []
