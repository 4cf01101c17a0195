"""When a group suffices: members that failed for good, and filters."""

import pytest

from treadle_core.errors import InvalidFieldError
from treadle_experience.core.errors import FilterError
from treadle_experience.core.filters.reward_range import RewardRange
from treadle_experience.core.filters.zero_variance import ZeroVariance
from treadle_experience.core.state import TaskState


def play(world, *outcomes, most: int | None = None):
    """Leases one group and ends each episode with a reward, or fails it for good."""
    leased = world.lease(world.state.newest_version, most or len(outcomes))
    for ticket, outcome in zip(leased, outcomes, strict=True):
        if outcome == "fails":
            world.fail(ticket)
        else:
            world.complete(ticket, reward=outcome)
    return world.state.tasks[leased[0].task_id]


@pytest.mark.parametrize(
    ("min_episodes", "outcomes", "state"),
    [
        pytest.param(2, (1.0, "fails", 0.0), TaskState.READY, id="enough"),
        pytest.param(1, ("fails", "fails", 0.0), TaskState.READY, id="one-is-enough"),
        pytest.param(2, (1.0, "fails", "fails"), TaskState.FILTERED, id="too-few"),
        pytest.param(1, ("fails", "fails", "fails"), TaskState.FILTERED, id="none"),
        pytest.param(None, (1.0, 0.0, "fails"), TaskState.FILTERED, id="all-by-default"),
    ],
)
def test_a_group_is_used_with_what_it_has_where_that_suffices(
    make_world, min_episodes, outcomes, state
) -> None:
    world = make_world(group_size=3, retries=0, min_episodes=min_episodes).start()

    task = play(world, *outcomes)

    assert task.state is state
    assert task.reason == ("incomplete_group" if state is TaskState.FILTERED else "")
    assert world.reload() == world.state


def test_a_group_that_can_not_suffice_any_more_is_filtered_at_once(make_world) -> None:
    world = make_world(group_size=3, retries=0, min_episodes=2).start()
    first, second, third = world.lease(1, 3)

    world.fail(first)
    state = world.state.tasks[first.task_id].state
    world.fail(third)

    assert state is TaskState.OPEN
    assert world.state.tasks[first.task_id].state is TaskState.FILTERED
    assert second.episode_id not in world.state.running.get("r1", {})


def test_a_batch_holds_the_members_that_a_small_group_has(make_world) -> None:
    world = make_world(group_size=3, retries=0, min_episodes=2, tasks_per_step=1).start()
    play(world, 1.0, "fails", 0.0)

    (task,) = world.claim(1).tasks
    world.report(1)
    world.checkpoint(1)

    assert [episode.index for episode, _ in task.episodes] == [0, 2]
    account = world.account()
    assert len(account.places["consumed"]) == 2
    assert account.missing() == account.double_counted() == set()


@pytest.mark.parametrize(
    ("rewards", "ranged", "varied"),
    [
        pytest.param((0.0, 0.0), "reward_low", "zero_variance", id="all-wrong"),
        pytest.param((1.0, 1.0), "reward_high", "zero_variance", id="all-right"),
        pytest.param((1.0, 0.0), "", "", id="mixed"),
        pytest.param((0.5, 0.5), "", "zero_variance", id="equal-in-the-middle"),
        pytest.param((None, 0.5), "", "zero_variance", id="one-reward"),
        pytest.param((None, None), "no_reward", "no_reward", id="no-reward"),
    ],
)
def test_a_filter_says_why_it_drops_a_group(tools, rewards, ranged, varied) -> None:
    members = [tools.result(reward=reward) for reward in rewards]

    assert RewardRange(0.0, 1.0)(members) == ranged
    assert ZeroVariance()(members) == varied


def test_a_range_that_holds_nothing_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match=r"filter\.low"):
        RewardRange(1.0, 1.0)


def test_a_dropped_group_frees_its_place_so_that_another_task_opens(make_world) -> None:
    world = make_world(max_lag=0, tasks_per_step=2, filter_=ZeroVariance()).start()
    dropped = play(world, 0.0, 0.0)
    play(world, 0.0, 1.0)

    early = world.claim(1)
    refill = play(world, 1.0, 0.0)
    claim = world.claim(1)

    assert (dropped.state, dropped.reason) == (TaskState.FILTERED, "zero_variance")
    assert not early.tasks
    assert [task.task_id for task in claim.tasks] == ["t000002", refill.task_id]
    assert world.state.reasons == {"zero_variance": 1}
    assert len(world.account().places["filtered"]) == 2


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(lambda members: 1 / 0, id="raises"),
        pytest.param(lambda members: "two words", id="no-word"),
        pytest.param(lambda members: 3, id="no-text"),
    ],
)
def test_a_filter_that_fails_is_named(make_world, broken) -> None:
    world = make_world(filter_=broken).start()

    with pytest.raises(FilterError, match="t000001"):
        play(world, 0.0, 1.0)
