"""The short forms of the proofs that hurt a run."""

import pytest
from e2e_harness import measures, python

pytestmark = [pytest.mark.chaos, pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_run_in_which_every_service_is_killed_ends_whole() -> None:
    # How fast is a question to a machine that does nothing else.
    short = ("--kills", "4", "--minutes", "0.4", "--seed", "3", "--recovery-s", "60")
    values = measures(python("tools/chaos.py", *short).stdout)

    assert (values["kills"], values["victims"], values["unrecovered"]) == (4, 4, 0)
    assert (values["lost"], values["trained_twice"]) == (0, 0)
    assert (values["partial_groups"], values["unknown_versions"]) == (0, 0)


def test_services_that_fail_at_a_sample_of_their_failpoints_end_the_run_whole() -> None:
    values = measures(python("tools/failpoints.py", "--short", "--seed", "3").stdout)

    assert values["failures"] == 8


def test_a_trainer_that_stands_still_keeps_the_store_bounded() -> None:
    values = measures(python("tools/stopped_trainer.py", "--seconds", "5").stdout)

    assert (values["lost"], values["partial_groups"]) == (0, 0)
