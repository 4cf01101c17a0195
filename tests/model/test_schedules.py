"""The short profile of the ledger's model; `make model-tests` plays the long one."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_model.schedule import Schedule
from ledger_model.seeds import Tally, play

from treadle_experience.adapters.memory import MemoryLedger


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("ledger", "actions"), [("memory", 1000), ("sqlite", 200)])
def test_no_schedule_breaks_a_promise_or_stops_the_run(seed, ledger, actions):
    found = play(seed, actions, Tally(), ledger=ledger)

    assert found is None, "\n".join([*found.trace[-40:], repr(found.error)])


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(random=st.randoms(use_true_random=False), size=st.integers(1, 60))
def test_no_schedule_that_hypothesis_thinks_of_does_either(random, size):
    schedule = Schedule(random, MemoryLedger(), size)
    try:
        for _ in range(size):
            schedule.step()
        schedule.complete()
    finally:
        schedule.close()


def test_a_seed_is_one_schedule():
    first, second = Tally(), Tally()

    assert play(3, 300, first) is None
    assert play(3, 300, second) is None
    assert first == second
