"""Fields that requests of several contracts have."""

from collections.abc import Callable

import pytest

from treadle_core.errors import TreadleError
from treadle_core.faults import FaultReason
from treadle_runtime import fields

NUMBERS = {FaultReason.PAYLOAD_LOST: 1, FaultReason.QUARANTINED: 2}


def test_what_is_within_its_limits_is_returned() -> None:
    fields.check_run("run", "run")
    assert fields.at_least("step", 1, 1) == 1
    assert fields.hexadecimal("digest", "0f", 2) == "0f"
    assert fields.hexadecimal("digest", "", 2, optional=True) == ""
    assert fields.known("reason", 2, NUMBERS) is FaultReason.QUARANTINED
    assert fields.wait_s(fields.duration(1.25)) == 1.25


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (lambda: fields.check_run("run", "other"), "run_id: this is run run, not other"),
        (lambda: fields.check_run("run", ""), "run_id: expected"),
        (lambda: fields.at_least("step", 0, 1), "step: expected >= 1, got 0"),
        (lambda: fields.hexadecimal("digest", "0F", 2), "digest: expected 2 lower-case hex digits"),
        (lambda: fields.hexadecimal("digest", "", 2), "digest: expected 2 lower-case hex digits"),
        (lambda: fields.known("reason", 0, NUMBERS), "reason: expected one of 1, 2, got 0"),
        (lambda: fields.wait_s(fields.duration(-1)), "wait: expected >= 0, got -1 s"),
    ],
)
def test_what_is_not_is_told_with_field_and_limit(check: Callable[[], object], said: str) -> None:
    with pytest.raises(TreadleError, match=said):
        check()
