"""The adaptive window: what widens it, what narrows it, and what it never does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle_experience.core import steps
from treadle_experience.core.pace import BEARABLE, after_step
from treadle_experience.core.summary import summarise

FED = {"wait_s": 0.0, "train_s": 2.0}


def waited(steps_long: float) -> dict[str, float]:
    return {"wait_s": 2 * steps_long, "train_s": 2.0}


def test_a_wait_widens_the_window_by_as_many_steps_as_it_was_long() -> None:
    assert after_step(1.5, 9, waited(0.5), 4) == pytest.approx(2.0 - BEARABLE)
    assert after_step(1.5, 9, waited(2), 4) == pytest.approx(3.5 - BEARABLE)


def test_a_step_without_a_wait_narrows_the_window_a_little_down_to_no_lag() -> None:
    assert after_step(1.5, 9, FED, 4) == pytest.approx(1.5 - BEARABLE)
    assert after_step(BEARABLE / 2, 9, FED, 4) == 0.0


@pytest.mark.parametrize(("aim", "hidden"), [(0.0, 4), (1.5, 3), (3.9, 1), (4.0, 0), (4.9, 0)])
def test_no_more_of_a_wait_counts_than_a_full_window_would_have_hidden(aim, hidden) -> None:
    assert after_step(aim, 9, waited(1000), 4) == pytest.approx(aim + hidden - BEARABLE)


@pytest.mark.parametrize(("step", "hidden"), [(1, 0), (2, 0), (3, 1), (4, 2), (5, 3), (6, 3)])
def test_no_window_opens_a_task_before_the_first_step(step, hidden) -> None:
    assert after_step(1.5, step, waited(1000), 4) == pytest.approx(1.5 + hidden - BEARABLE)


@given(st.lists(st.floats(0, 100) | st.just(0.0), max_size=100))
def test_waits_that_lag_would_have_hidden_are_a_bearable_share_whatever_comes(waits) -> None:
    aim, max_lag, hidden = 2.0, 4, 0.0
    for step, wait in enumerate(waits, start=1):
        hidden += min(wait, max(0, min(max_lag, step - 1) - int(aim)))
        aim = after_step(aim, step, waited(wait), max_lag)
        assert 0 <= aim < max_lag + 1

    assert hidden <= BEARABLE * len(waits) + max_lag + 1


@pytest.mark.parametrize("metrics", [{}, {"wait_s": 1.0}, {"wait_s": 1.0, "train_s": 0.0}])
def test_a_report_without_times_changes_nothing(metrics) -> None:
    assert after_step(1.5, 9, metrics, 4) == 1.5


def test_an_adaptive_window_opens_what_it_aims_at_and_starts_at_half(make_world) -> None:
    fixed, adaptive = (make_world(max_lag=4, adaptive=each).start() for each in (False, True))

    assert len({t.task_id for t in fixed.lease(1)}) == 10
    assert len({t.task_id for t in adaptive.lease(1)}) == 6


@pytest.mark.parametrize(
    ("aim", "tasks", "lag"),
    [(0.0, 2, 0), (0.4, 2, 0), (0.5, 3, 1), (2.5, 7, 3), (4.0, 10, 4), (4.9, 10, 4)],
)
def test_a_fraction_of_a_step_is_of_its_tasks_and_max_lag_is_the_most(
    make_world, aim, tasks, lag
) -> None:
    world = make_world(max_lag=4, adaptive=True).start()
    world.state.aim = aim

    world.lease(1)

    assert len(world.state.window) == tasks
    assert summarise(world.run).window_lag == lag


def test_an_adaptive_window_follows_what_the_trainer_waited(make_world) -> None:
    world = make_world(max_lag=1, adaptive=True).start()
    sizes = []
    for step, metrics in ((1, FED), (2, waited(0.5)), (3, FED)):
        version = world.state.newest_version
        for ticket in world.lease(version):
            world.complete(ticket, versions=[version])
        sizes.append(len(world.state.window))
        world.claim(step)
        world.report(step, **metrics)
        world.publish(step)

    assert sizes == [3, 2, 3]
    assert world.reload() == world.state


def test_a_window_narrower_than_the_gap_between_versions_opens_for_a_waiting_trainer(
    make_world,
) -> None:
    world = make_world(max_lag=1, adaptive=True).start()
    world.state.aim = 0.0
    world.train(1)

    closed = world.lease(1)
    early = world.claim(2)
    opened = world.lease(1)

    assert closed == []
    assert early == steps.Claim()
    assert {t.task_id for t in opened} == {"t000003", "t000004"}
    for ticket in opened:
        world.complete(ticket)
    assert len(world.claim(2).tasks) == 2


def test_a_window_that_narrows_takes_no_ticket_back(make_world) -> None:
    world = make_world(max_lag=4, adaptive=True).start()
    leased = world.lease(1)
    world.state.aim = 0.0

    for ticket in leased:
        world.complete(ticket)

    assert len(world.state.window) == 6
