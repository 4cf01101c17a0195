"""What is said of the next claims, before they are made."""

from treadle_experience import wire
from treadle_experience.core.preview import preview
from treadle_experience.core.rules import Overdue


def names(coming):
    return [([task.task_id for task in step.tasks], step.ready) for step in coming]


def test_a_preview_says_what_the_next_claims_will_hold_and_claims_nothing(make_world) -> None:
    world = make_world(max_lag=2).start()
    for ticket in world.lease(1):
        world.complete(ticket)
    position = world.state.position

    coming = preview(world.run, max_steps=2)

    assert names(coming) == [(["t000001", "t000002"], True), (["t000003", "t000004"], True)]
    assert world.state.position == position
    assert world.claim(1).tasks == coming[0].tasks


def test_a_batch_that_is_claimed_and_not_trained_comes_first_and_beyond_the_depth(
    make_world,
) -> None:
    world = make_world(max_lag=2).start()
    for ticket in world.lease(1):
        world.complete(ticket)
    claimed = world.claim(1)

    coming = preview(world.run, max_steps=1)

    assert [step.step for step in coming] == [1, 2]
    assert coming[0].tasks == claimed.tasks
    world.report(1)
    assert [step.step for step in preview(world.run, max_steps=1)] == [2]


def test_members_that_still_run_make_a_step_not_ready_and_are_left_out(make_world) -> None:
    world = make_world(max_lag=1).start()
    first, *_ = world.lease(1)
    world.complete(first)

    (coming,) = preview(world.run, max_steps=2)

    assert not coming.ready
    assert [[e.episode_id for e, _ in task.episodes] for task in coming.tasks] == [
        [first.episode_id],
        [],
    ]


def test_nothing_is_looked_ahead_beyond_the_lag_the_last_step_or_what_may_be_late(
    make_world,
) -> None:
    on_policy = make_world(max_lag=0).start()
    short = make_world(max_lag=2, steps=1).start()
    late = make_world(max_lag=2, overdue=Overdue.LATE, max_overdue_lag=2).start()
    for world in (on_policy, short, late):
        slow, *rest = world.lease(1)
        for ticket in rest:
            world.complete(ticket)
    assert preview(on_policy.run, max_steps=2) == []
    assert [step.step for step in preview(short.run, max_steps=2)] == [1]
    assert slow.task_id == "t000001"
    ready = [(["t000002", "t000003"], True), (["t000004", "t000005"], True)]
    assert names(preview(late.run, max_steps=2)) == ready


def test_the_bytes_of_an_inline_payload_are_not_sent_ahead(make_world) -> None:
    world = make_world().start()
    for ticket in world.lease(1):
        world.complete(ticket)
    (coming,) = preview(world.run, max_steps=1)
    payloads = [
        episode.result.payload for task in wire.previewed(coming).tasks for episode in task.episodes
    ]
    assert all(payload.HasField("inline") and not payload.inline for payload in payloads)
