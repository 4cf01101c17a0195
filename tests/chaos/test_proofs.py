"""The short forms of `make chaos-smoke` and `make failpoints`."""

import pytest
from e2e_harness import measures, python

pytestmark = [pytest.mark.chaos, pytest.mark.e2e, pytest.mark.timeout(600)]


def test_every_service_is_killed_or_stopped_once_and_the_run_ends_whole() -> None:
    values = measures(python("tools/chaos.py", "--short", "--seed", "3").stdout)

    assert (values["kills"], values["stops"]) == (2, 2)
    assert (values["lost"], values["trained_twice"]) == (0, 0)
    assert (values["partial_groups"], values["unknown_versions"]) == (0, 0)


def test_services_that_fail_at_a_sample_of_their_failpoints_end_the_run_whole() -> None:
    values = measures(python("tools/failpoints.py", "--short", "--seed", "3").stdout)

    assert values["failures"] == 8
