"""The ledger's model in its short profile; `make model-tests` plays the long one."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from ledger_model.machine import machine_of
from ledger_model.seeds import Tally, play

from treadle_runtime.testing import RedisProcess

REDIS = (
    pytest.mark.processes,
    pytest.mark.skipif(not RedisProcess.is_installed(), reason="NO redis-server ON PATH"),
)
LONG = settings.get_current_profile_name() == "long"


@pytest.mark.parametrize(
    ("ledger", "examples"), [("memory", 60), ("sqlite", 12), pytest.param("redis", 12, marks=REDIS)]
)
def test_no_rules_break_a_promise_or_stop_the_run(ledger, examples):
    changed = settings(
        max_examples=4 * examples if LONG else examples,
        stateful_step_count=100 if LONG else 30,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine_of(ledger), settings=changed)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("ledger", "actions"),
    [("memory", 1000), ("sqlite", 200), pytest.param("redis", 200, marks=REDIS)],
)
def test_no_seed_breaks_a_promise_or_stops_the_run(seed, ledger, actions):
    found = play(seed, actions, Tally(), ledger=ledger)

    assert found is None, "\n".join([*found.trace[-40:], repr(found.error)])


def test_a_seed_is_one_schedule():
    first, second = Tally(), Tally()

    assert play(3, 300, first) is None
    assert play(3, 300, second) is None
    assert first == second
