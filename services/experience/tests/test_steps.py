"""Claims, reports, and the end of a run."""

import pytest

from treadle_experience.core import steps, tickets
from treadle_experience.core.errors import (
    LagBrokenError,
    StaleAttemptError,
    StepOutOfOrderError,
    TrainerFencedError,
)
from treadle_experience.core.state import TaskState


def test_a_claim_takes_the_oldest_tasks_and_waits_for_all_of_them(make_world) -> None:
    world = make_world().start()
    pairs = [world.lease(1, 2) for _ in range(3)]
    for ticket in (*pairs[1], *pairs[2], pairs[0][0]):
        world.complete(ticket)

    early = world.claim(1)
    world.complete(pairs[0][1])
    claim = world.claim(1)

    assert early == steps.Claim()
    assert [task.task_id for task in claim.tasks] == ["t000001", "t000002"]
    assert [e.episode_id for e, _ in claim.tasks[0].episodes] == [t.episode_id for t in pairs[0]]
    assert [oldest for _, oldest in claim.tasks[0].episodes] == [0, 0]


def test_a_claim_is_answered_as_the_first_time(make_world) -> None:
    world = make_world().start()
    for ticket in world.lease(1):
        world.complete(ticket)

    first = world.claim(1)
    position = world.state.position

    assert world.claim(1) == first
    assert world.state.position == position


@pytest.mark.parametrize("step", [2, 3])
def test_only_the_step_after_the_last_trained_one_can_be_claimed(make_world, step) -> None:
    world = make_world().start()

    with pytest.raises(StepOutOfOrderError) as caught:
        world.claim(step)

    assert (caught.value.field, caught.value.limit) == ("step", "1")


def test_the_first_report_of_a_step_wins(make_world) -> None:
    world = make_world().start()
    world.train(1)
    position = world.state.position

    world.report(1)

    assert world.state.position == position
    with pytest.raises(StepOutOfOrderError):
        world.report(2)


def test_an_old_trainer_is_fenced_and_told_the_newer_epoch(make_world) -> None:
    world = make_world().start()
    head = world.state.head()
    world.train(1)
    old = world.epoch
    world.acquire("successor", head.digest)

    for call in (
        lambda: steps.claim(world.run, trainer_epoch=old, step=1),
        lambda: steps.report(world.run, trainer_epoch=old, step=1, metrics={}, trace_id=""),
    ):
        with pytest.raises(TrainerFencedError, match="fenced by epoch 2"):
            call()


def test_a_breach_of_the_lag_bound_stops_the_run_loudly(make_world) -> None:
    world = make_world(max_lag=3).start()
    world.train(1)
    world.train(2)
    world.run.rules = make_world(max_lag=0).rules

    with pytest.raises(LagBrokenError):
        world.train(3)


def test_the_last_step_closes_the_run_and_evicts_what_was_not_claimed(make_world) -> None:
    world = make_world(steps=1, max_lag=2, retries=0).start()
    waste = world.lease(1, 1)[0]
    world.fail(waste)
    world.run.rules = make_world(steps=5, max_lag=2).rules
    tickets_ = world.lease(1)
    world.run.rules = world.rules
    for ticket in tickets_[:-1]:
        world.complete(ticket)

    claim = world.claim(1)
    world.report(1)

    assert claim.last
    assert world.state.task_counts[TaskState.EVICTED] == len(tickets_) // 2 - 2
    evicted = [t for t in world.state.tasks.values() if t.state is TaskState.EVICTED]
    assert {t.reason for t in evicted} == {"run_ended"}
    with pytest.raises(StaleAttemptError):
        world.complete(tickets_[-1])
    assert world.lease(1) == []
    assert not steps.is_complete(world.run)
    world.checkpoint(1)
    assert steps.is_complete(world.run)
    assert world.claim(2).complete


@pytest.mark.parametrize(
    ("num_tasks", "sizes"),
    [
        pytest.param(4, [2, 2], id="at-a-batch-border"),
        pytest.param(5, [2, 2, 1], id="a-short-last-batch"),
        pytest.param(1, [1], id="less-than-one-batch"),
    ],
)
def test_the_run_ends_when_its_tasks_do(make_world, num_tasks, sizes) -> None:
    world = make_world(num_tasks=num_tasks).start()
    trained = []
    for step in range(1, len(sizes) + 1):
        trained.append(world.train(step))
        world.publish(step)
    last = len(sizes)
    world.checkpoint(last)

    assert [len(tasks) for tasks in trained] == sizes
    assert world.state.steps[last].last
    assert (world.state.closed, world.state.last_step) == (True, last)
    assert steps.is_complete(world.run)


def test_a_last_batch_that_cannot_fill_is_dropped_where_the_recipe_says_so(make_world) -> None:
    world = make_world(num_tasks=3, drop_last=True).start()
    world.train(1)
    version = world.publish(1)
    for ticket in world.lease(version):
        world.complete(ticket, versions=[version])

    claim = world.claim(2)

    assert claim.complete
    assert world.state.last_step == 1
    evicted = [t for t in world.state.tasks.values() if t.state is TaskState.EVICTED]
    assert [t.reason for t in evicted] == ["last_batch"]


def test_a_run_whose_tasks_all_fail_ends_without_a_step(make_world) -> None:
    world = make_world(num_tasks=3, retries=0).start()
    while leased := world.lease(1, 1):
        world.fail(leased[0])

    claim = world.claim(1)

    assert claim.complete
    assert steps.is_complete(world.run)
    assert world.state.task_counts[TaskState.FILTERED] == 3


def test_a_tail_that_is_filtered_ends_the_run_at_the_step_before(make_world) -> None:
    world = make_world(num_tasks=3, retries=0).start()
    leased = world.lease(1)
    for ticket in leased[:-1]:
        world.complete(ticket)
    early = world.claim(1)
    world.report(1)
    world.fail(leased[-1])

    assert not early.last
    assert world.claim(2).complete
    assert world.state.last_step == 1


def test_waiting_for_a_ticket_does_not_move_the_journal(make_world) -> None:
    world = make_world().start()
    world.lease(1)
    position = world.state.position

    world.lease(1)
    tickets.renew(world.run, replica_id="r1", served_version=1, attempts=[])
    world.claim(1)

    assert world.state.position == position
