"""Batches that a trainer hands back: lost payloads, quarantined episodes, and who fills in."""

import pytest

from treadle_core.faults import Fault, FaultReason
from treadle_experience.core import faults, steps
from treadle_experience.core.errors import (
    StaleAttemptError,
    StepOutOfOrderError,
    TrainerFencedError,
    UnknownEpisodeError,
)
from treadle_experience.core.rules import Overdue
from treadle_experience.core.state import EpisodeState, TaskState


def ready(world, version: int = 1) -> None:
    for ticket in world.lease(version):
        world.complete(ticket, versions=[version])


def names(claim: steps.Claim) -> list[str]:
    return [task.task_id for task in claim.tasks]


def member(world, task_id: str, index: int = 0):
    return world.state.tasks[task_id].episodes[index]


def three_steps(world) -> None:
    """Claims and trains steps 1 to 3, then goes back to the start: three batches are recorded."""
    head = world.state.head().digest
    for step in (1, 2, 3):
        world.train(step)
        world.publish(step)
    world.acquire("successor", head)
    world.publish(0)


def test_a_batch_handed_back_without_a_fault_stands_as_it_is(make_world) -> None:
    world = make_world().start()
    ready(world)
    first = world.claim(1)
    position = world.state.position

    world.hand_back(1)

    assert world.claim(1) == first
    assert world.state.position == position


def test_a_lost_payload_is_made_again_in_its_place_and_charges_no_retry(make_world) -> None:
    world = make_world(retries=0).start()
    ready(world)
    batch = names(world.claim(1))
    lost = member(world, batch[0], 1)

    world.hand_back(1, (lost, FaultReason.PAYLOAD_LOST))

    assert world.state.tasks[batch[0]].state is TaskState.OPEN
    assert (lost.state, lost.result, lost.inline) == (EpisodeState.WAITING, None, None)
    assert lost.episode_id not in world.account().acknowledged
    assert world.claim(1) == steps.Claim()
    (again,) = world.lease(1)
    assert (again.episode_id, again.attempt, again.spec) == (lost.episode_id, 2, {"number": 0})
    world.complete(again)
    claim = world.claim(1)
    assert names(claim) == batch
    assert [e.attempt for e, _ in claim.tasks[0].episodes] == [1, 2]
    assert (world.state.lost_payloads, lost.charged) == (1, 0)
    assert world.reload() == world.state


def test_a_fault_is_handed_back_once(make_world) -> None:
    world = make_world(max_lag=3).start()
    ready(world)
    batch = names(world.claim(1))
    lost, unfit = member(world, batch[0]), member(world, batch[1])
    said = [(lost, FaultReason.PAYLOAD_LOST), (unfit, FaultReason.QUARANTINED)]
    again = [world.fault(*each) for each in said]
    world.hand_back(1, *said)
    position = world.state.position

    faults.hand_back(world.run, trainer_epoch=world.epoch, step=1, faults=again)

    assert world.state.position == position
    ready(world)
    faults.hand_back(world.run, trainer_epoch=world.epoch, step=1, faults=again)
    assert lost.state is EpisodeState.DONE


def test_a_quarantined_task_is_replaced_by_the_next_unclaimed_one(make_world) -> None:
    world = make_world().start()
    ready(world)
    batch = names(world.claim(1))

    world.hand_back(1, (member(world, batch[0]), FaultReason.QUARANTINED))

    task = world.state.tasks[batch[0]]
    assert (task.state, task.reason) == (TaskState.QUARANTINED, "unfit")
    assert names(world.claim(1)) == [batch[1], "t000003"]
    assert world.state.reasons == {"unfit": 1}
    assert [e.inline is not None for e in task.episodes] == [True, False]
    account = world.account()
    assert len(account.places["quarantined"]) == 2
    assert account.double_counted() == account.missing() == set()


LATE = {"overdue": Overdue.LATE, "max_overdue_lag": 3}


def test_a_task_that_was_passed_over_takes_the_free_place_and_no_other(make_world) -> None:
    world = make_world(group_size=1, **LATE).start()
    slow, *quick = world.lease(1)
    for ticket in quick:
        world.complete(ticket)
    batch = names(world.claim(1))
    world.complete(slow)

    world.hand_back(1, (member(world, batch[1]), FaultReason.QUARANTINED))

    assert batch == ["t000002", "t000003"]
    assert names(world.claim(1)) == ["t000001", "t000002"]
    assert world.state.kept == set()
    assert world.reload() == world.state


@pytest.mark.parametrize("rules", [LATE, {"overdue": Overdue.EVICT}], ids=["late", "evict"])
def test_a_lost_member_keeps_its_place_beside_one_that_is_replaced(make_world, rules) -> None:
    world = make_world(group_size=1, **rules).start()
    ready(world)
    batch = names(world.claim(1))
    lost, unfit = (member(world, task_id) for task_id in batch)

    world.hand_back(1, (lost, FaultReason.PAYLOAD_LOST), (unfit, FaultReason.QUARANTINED))

    assert world.claim(1) == steps.Claim()  # two others are ready
    ready(world)
    assert names(world.claim(1)) == [batch[0], "t000003"]


def test_a_narrow_window_opens_again_where_later_steps_moved_down(make_world) -> None:
    world = make_world(tasks_per_step=1, group_size=1, adaptive=True).start()
    three_steps(world)
    for step in (1, 2, 3):
        world.claim(step)
        world.report(step)
    world.claim(4)
    world.acquire("another", world.state.head().digest)
    world.hand_back(1, (member(world, *world.state.steps[1].task_ids), FaultReason.QUARANTINED))
    for step in (1, 2):
        world.claim(step)
        world.report(step)

    world.claim(3)

    assert world.state.starved_step == 3


def test_a_replacement_that_still_runs_is_waited_for(make_world) -> None:
    world = make_world(max_lag=0).start()
    ready(world)
    batch = names(world.claim(1))

    world.hand_back(1, (member(world, batch[1]), FaultReason.QUARANTINED))

    assert world.claim(1) == steps.Claim()
    ready(world)
    assert names(world.claim(1)) == [batch[0], "t000003"]


def test_nothing_replaces_a_member_where_a_later_batch_is_recorded(make_world) -> None:
    world = make_world().start()
    three_steps(world)
    first, second = world.state.steps[1].task_ids, world.state.steps[2].task_ids
    world.claim(1)

    world.hand_back(1, (member(world, first[0]), FaultReason.QUARANTINED))

    assert names(world.claim(1)) == [first[1]]
    world.report(1)
    assert names(world.claim(2)) == list(second)
    assert world.account().double_counted() == set()


def test_a_batch_that_lost_all_its_members_is_no_step_any_more(make_world) -> None:
    world = make_world(tasks_per_step=1, group_size=1).start()
    three_steps(world)
    (first,), (second,) = world.state.steps[1].task_ids, world.state.steps[2].task_ids
    world.claim(1)

    world.hand_back(1, (member(world, first), FaultReason.QUARANTINED))

    assert names(world.claim(1)) == [second]
    assert world.state.last_claimed() == 2
    for step in (1, 2, 3):
        if step > 1:
            world.claim(step)
        world.report(step) if step < 3 else None
    world.checkpoint(2)
    assert len(world.account().places["consumed"]) == 2
    assert world.reload() == world.state


def test_a_closed_run_ends_earlier_where_its_last_batch_is_gone(make_world, tools) -> None:
    world = make_world(
        steps=2, tasks_per_step=1, group_size=1, max_lag=0, evaluation=tools.evaluation(every=9)
    ).start()
    ready(world)
    world.train(1)
    world.publish(1)
    digest = world.checkpoint(1)
    world.train(2)
    world.acquire("successor", digest)
    version = world.publish(1)
    (last,) = names(world.claim(2))

    world.hand_back(2, (member(world, last), FaultReason.QUARANTINED))

    assert world.claim(2).complete
    assert world.state.last_step == 1
    ready(world, version)
    assert steps.is_complete(world.run)


def test_a_lost_member_of_a_later_batch_waits_until_its_lag_allows(make_world) -> None:
    world = make_world(max_lag=1, tasks_per_step=1, group_size=1).start()
    three_steps(world)
    version = world.state.newest_version
    for step in (1, 2):
        world.claim(step)
        world.report(step)
    (third,) = names(world.claim(3))

    world.hand_back(3, (member(world, third), FaultReason.PAYLOAD_LOST))

    assert world.lease(version) == []  # of step 0: its tokens would be trained two steps late
    assert [t.task_id for t in world.lease(world.publish(1), 1)] == [third]


def test_a_lost_member_that_fails_for_good_makes_room_for_another_task(make_world) -> None:
    world = make_world(retries=0).start()
    ready(world)
    batch = names(world.claim(1))
    world.hand_back(1, (member(world, batch[0]), FaultReason.PAYLOAD_LOST))
    (again,) = world.lease(1, 1)

    world.fail(again)

    assert world.state.tasks[batch[0]].reason == "incomplete_group"
    assert names(world.claim(1)) == [batch[1], "t000003"]


def test_a_batch_that_was_handed_back_is_not_reported(make_world) -> None:
    world = make_world().start()
    ready(world)
    batch = names(world.claim(1))
    lost = member(world, batch[0])
    world.hand_back(1, (lost, FaultReason.PAYLOAD_LOST))

    with pytest.raises(StepOutOfOrderError, match="handed back"):
        world.report(1)
    with pytest.raises(StaleAttemptError):  # a zombie that sends the lost result again
        world.complete(world.ticket(lost, 1))


def test_what_is_not_in_the_batch_is_refused_and_nothing_happens(make_world) -> None:
    world = make_world().start()
    ready(world)
    batch = names(world.claim(1))
    good = world.fault(member(world, batch[0]), FaultReason.PAYLOAD_LOST)
    position = world.state.position

    for bad in (
        Fault("nobody", 1, FaultReason.PAYLOAD_LOST, ""),
        world.fault(member(world, "t000003"), FaultReason.PAYLOAD_LOST),
        Fault(member(world, batch[1]).episode_id, 2, FaultReason.QUARANTINED, ""),
    ):
        with pytest.raises(UnknownEpisodeError) as caught:
            faults.hand_back(world.run, trainer_epoch=world.epoch, step=1, faults=[good, bad])
        assert caught.value.field == "faults"
    with pytest.raises(TrainerFencedError):
        faults.hand_back(world.run, trainer_epoch=world.epoch + 1, step=1, faults=[])
    with pytest.raises(StepOutOfOrderError):
        world.hand_back(2)
    assert world.state.position == position
