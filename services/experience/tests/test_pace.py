"""The adaptive window: what widens it, what narrows it, and what it never does."""

from dataclasses import replace

import pytest

from treadle_experience.core import steps
from treadle_experience.core.pace import LONGEST_DEBT, SPELL, Pace, after_step

FED = {"wait_s": 0.0, "train_s": 1.0}
HUNGRY = {"wait_s": 0.5, "train_s": 1.0}


def after(pace: Pace, *reports: dict[str, float], max_lag: int = 4) -> Pace:
    for report in reports:
        pace = after_step(pace, report, max_lag)
    return pace


def test_a_wait_widens_the_window_by_a_step_up_to_max_lag() -> None:
    assert after(Pace(1), HUNGRY).lag == 2
    assert after(Pace(1), *[HUNGRY] * 9).lag == 4


def test_a_trainer_that_is_fed_narrows_the_window_a_step_a_spell() -> None:
    assert after(Pace(2), *[FED] * (SPELL - 1)).lag == 2
    assert after(Pace(2), *[FED] * SPELL).lag == 1
    assert after(Pace(2), *[FED] * 9 * SPELL).lag == 0


def test_a_wait_is_paid_for_before_the_window_narrows_again() -> None:
    hungry = after(Pace(1), HUNGRY)

    # Half a step waited is one hundredth of fifty.
    assert after(hungry, *[FED] * 48).lag == 2
    assert after(hungry, *[FED] * 49).lag == 1


def test_a_debt_has_a_limit() -> None:
    starved = after(Pace(4), *[{"wait_s": 1000.0, "train_s": 1.0}] * 50)

    assert after(starved, *[FED] * (LONGEST_DEBT + 1)).lag == 3


def test_a_wait_too_short_to_matter_is_none() -> None:
    assert after(Pace(1), {"wait_s": 0.01, "train_s": 1.0}).lag == 1


@pytest.mark.parametrize("metrics", [{}, {"wait_s": 1.0}, {"wait_s": 1.0, "train_s": 0.0}])
def test_a_report_without_times_changes_nothing(metrics) -> None:
    assert after(Pace(1), metrics) == Pace(1)


def test_an_adaptive_window_opens_what_it_aims_at_and_starts_at_half(make_world) -> None:
    fixed, adaptive = (make_world(max_lag=4, adaptive=each).start() for each in (False, True))

    assert len({t.task_id for t in fixed.lease(1)}) == 10
    assert len({t.task_id for t in adaptive.lease(1)}) == 6


def test_an_adaptive_window_follows_what_the_trainer_waited(make_world) -> None:
    world = make_world(max_lag=4, adaptive=True).start()
    world.lease(1)
    for ticket in [world.ticket(e, 1) for e in world.state.episodes.values()]:
        world.complete(ticket)
    world.claim(1)

    world.report(1, **HUNGRY)

    world.lease(world.publish(1))
    assert len(world.state.window) == 8  # four steps' worth, of which one is trained
    assert world.reload() == world.state


def test_a_window_narrower_than_the_gap_between_versions_opens_for_a_waiting_trainer(
    make_world,
) -> None:
    world = make_world(max_lag=1, adaptive=True).start()
    assert world.state.pace.lag == 0
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
    world.state.pace = replace(world.state.pace, lag=0)

    for ticket in leased:
        world.complete(ticket)

    assert len(world.state.window) == 6
