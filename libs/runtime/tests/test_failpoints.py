"""What a failpoint does when it is armed, and that it does nothing otherwise."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from treadle_core.errors import InvalidFieldError
from treadle_runtime import failpoints
from treadle_runtime.failpoints import ENVIRONMENT, SPENT, FailpointError, arm, failpoint, names_in

HIT = (
    "import os, sys; from treadle_runtime.failpoints import arm, failpoint; arm(os.environ); "
    "[failpoint('a.b') for _ in range(3)]; print('went on')"
)


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    arm({})


def test_nothing_happens_without_the_variable() -> None:
    arm({})

    failpoint("experience.append.before_flush")


def test_only_the_name_that_is_armed_acts() -> None:
    arm({ENVIRONMENT: "a.b=raise, c.d=sleep:0"})

    failpoint("a.c")
    failpoint("c.d")
    with pytest.raises(FailpointError, match=r"a\.b"):
        failpoint("a.b")


def test_a_hit_is_waited_for_and_acts_once() -> None:
    arm({ENVIRONMENT: "a.b=raise@3"})

    failpoint("a.b")
    failpoint("a.b")
    with pytest.raises(FailpointError):
        failpoint("a.b")
    failpoint("a.b")


def test_sleep_holds_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(failpoints.time, "sleep", slept.append)
    arm({ENVIRONMENT: "a.b=sleep:1.5"})

    failpoint("a.b")

    assert slept == [1.5]


@pytest.mark.processes
def test_exit_ends_the_process_at_once_and_once_for_all_its_lives(tmp_path: Path) -> None:
    env = os.environ | {ENVIRONMENT: "a.b=exit:7@2", SPENT: str(tmp_path)}

    first, second = (
        subprocess.run([sys.executable, "-c", HIT], env=env, capture_output=True, check=False)
        for _ in range(2)
    )

    assert (first.returncode, first.stdout) == (7, b"")
    assert (second.returncode, second.stdout) == (0, b"went on\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a.b"]


@pytest.mark.parametrize(
    "entry",
    ["a.b", "a.b=explode", "a.b=exit", "a.b=exit:x", "a.b=raise:1", "a.b=sleep:-1", "a.b=raise@0"],
)
def test_what_cannot_be_read_is_refused_with_the_form(entry: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        arm({ENVIRONMENT: f"c.d=raise,{entry}"})

    assert (refused.value.field, refused.value.value) == (ENVIRONMENT, entry)
    assert "exit:STATUS" in refused.value.limit


def test_a_name_that_cannot_be_listed_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text("name = 'a'\nfailpoint(name)\n")

    with pytest.raises(ValueError, match=r"x\.py:2"):
        names_in([source])


def test_being_disarmed_costs_next_to_nothing() -> None:
    arm({})
    began = time.perf_counter()
    for _ in range(100_000):
        failpoint("experience.append.before_flush")

    assert time.perf_counter() - began < 1.0
