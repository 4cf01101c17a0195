"""Who may run what: the window, its order, and the lag bound."""

import pytest

from treadle_experience.core import admission
from treadle_experience.core.errors import UnknownVersionError


@pytest.mark.parametrize(
    ("max_lag", "expected"),
    [
        pytest.param(0, 4, id="on-policy"),
        pytest.param(1, 8, id="lag-1"),
        pytest.param(3, 16, id="3"),
    ],
)
def test_a_start_opens_one_window_of_tasks(make_world, max_lag, expected) -> None:
    world = make_world(max_lag=max_lag).start()

    tickets = world.lease(1)

    assert len(tickets) == expected  # (max_lag + 1) * 2 tasks * 2 episodes
    assert world.lease(1) == []


def test_tickets_come_oldest_task_first_and_members_in_order(make_world) -> None:
    world = make_world().start()

    tickets = world.lease(1, 3)

    assert [(t.task_id, t.index, t.attempt) for t in tickets] == [
        ("t000001", 0, 1),
        ("t000001", 1, 1),
        ("t000002", 0, 1),
    ]
    assert [t.spec for t in tickets] == [{"number": 0}, {"number": 0}, {"number": 1}]


def test_a_task_holds_its_place_until_its_step_is_served(make_world) -> None:
    world = make_world(max_lag=0).start()
    world.train(1)

    before = world.lease(1)
    world.checkpoint(1)
    consumed = world.lease(1)
    version = world.publish(1)
    served = world.lease(version)

    assert (before, consumed) == ([], [])
    assert len(served) == 4


def test_a_filtered_task_frees_its_place(make_world) -> None:
    world = make_world(max_lag=0, retries=0).start()
    first = world.lease(1)[0]

    world.fail(first)
    refill = world.lease(1)

    assert {t.task_id for t in refill} == {"t000003"}


def test_a_reissued_ticket_goes_only_to_a_replica_that_is_near_enough(make_world) -> None:
    world = make_world(max_lag=0).start()
    world.train(1)
    version = world.publish(1)
    reissued = world.lease(version, 1)[0]
    world.fail(reissued)

    to_the_old = world.lease(1)
    to_the_new = world.lease(version, 1)

    assert to_the_old == []
    assert (to_the_new[0].episode_id, to_the_new[0].attempt) == (reissued.episode_id, 2)


def test_an_older_waiting_ticket_goes_before_a_new_task(make_world) -> None:
    world = make_world().start()
    first, _ = world.lease(1, 2)
    world.fail(first)

    again = world.lease(1, 1)[0]

    assert (again.episode_id, again.attempt) == (first.episode_id, 2)


def test_nothing_is_opened_that_no_remaining_step_can_take(make_world) -> None:
    world = make_world(steps=1, max_lag=5).start()

    assert {t.task_id for t in world.lease(1)} == {"t000001", "t000002"}


@pytest.mark.parametrize("version", [2, 7])
def test_a_version_that_is_not_committed_gets_nothing(make_world, version) -> None:
    world = make_world().start()

    with pytest.raises(UnknownVersionError, match=f"version {version} is not registered"):
        world.lease(version)


def test_tasks_beyond_a_step_count_every_later_batch(make_world) -> None:
    world = make_world(max_lag=3).start()
    world.train(1)
    world.train(2)

    assert [admission.tasks_beyond(world.state, step) for step in (0, 1, 2, 9)] == [4, 2, 0, 0]
