"""Tasks that still run when a batch could be formed without them."""

import pytest

from treadle_experience.core import steps
from treadle_experience.core.rules import Overdue
from treadle_experience.core.state import TaskState

LATE = {"overdue": Overdue.LATE, "max_overdue_lag": 2, "tasks_per_step": 1, "group_size": 1}


def names(claim: steps.Claim) -> list[str]:
    return [task.task_id for task in claim.tasks]


def pass_over(world, through: int):
    """Leaves the first task running while the steps up to `through` are trained without it."""
    slow, *rest = world.lease(1)
    for ticket in rest:
        world.complete(ticket)
    for step in range(1, through + 1):
        assert names(world.claim(step)) == [f"t{step + 1:06d}"]
        world.report(step)
        version = world.publish(step)
        for ticket in world.lease(version, replica="r2"):
            world.complete(ticket, versions=[version], replica="r2")
    return slow


def test_late_passes_over_what_runs_and_trains_it_when_it_is_done(make_world) -> None:
    world = make_world(**LATE).start()
    slow = pass_over(world, 2)

    world.complete(slow)
    claim = world.claim(3)

    assert names(claim) == ["t000001"]
    assert [oldest for _, oldest in claim.tasks[0].episodes] == [0]  # beyond max_lag 1
    assert world.reload() == world.state


@pytest.mark.parametrize("done", [True, False], ids=["done", "running"])
def test_late_evicts_what_lags_beyond_its_limit(make_world, done) -> None:
    world = make_world(**LATE).start()
    slow = pass_over(world, 2)
    if done:
        world.complete(slow)
        world.run.rules = make_world(**LATE | {"max_overdue_lag": 1}).rules
    else:
        assert names(world.claim(3)) == ["t000004"]
        world.report(3)

    world.claim(3 if done else 4)

    task = world.state.tasks["t000001"]
    assert (task.state, task.reason) == (TaskState.EVICTED, "lag")
    assert world.state.reasons == {"lag": 1}
    assert world.account().double_counted() == world.account().missing() == set()


def test_a_task_that_was_passed_over_keeps_its_place(make_world) -> None:
    world = make_world(**LATE).start()
    pass_over(world, 1)

    assert world.state.window[0] == 1
    assert len(world.state.window) == world.rules.bound


def test_evict_makes_room_for_what_is_ready(make_world) -> None:
    world = make_world(overdue=Overdue.EVICT, tasks_per_step=1, group_size=1).start()
    slow, quick = world.lease(1)

    early = world.claim(1)
    world.complete(quick)
    claim = world.claim(1)

    assert early == steps.Claim()
    assert names(claim) == [quick.task_id]
    task = world.state.tasks[slow.task_id]
    assert (task.state, task.reason) == (TaskState.EVICTED, "overdue")


@pytest.mark.parametrize("overdue", list(Overdue))
def test_a_last_short_batch_waits_for_what_still_runs(make_world, overdue) -> None:
    limit = 1 if overdue is Overdue.LATE else None
    world = make_world(
        overdue=overdue, max_overdue_lag=limit, num_tasks=1, tasks_per_step=2, group_size=1
    ).start()
    (only,) = world.lease(1)

    early = world.claim(1)
    world.complete(only)
    claim = world.claim(1)

    assert early == steps.Claim()
    assert (names(claim), claim.last) == ([only.task_id], True)
