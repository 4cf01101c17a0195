"""Grader `python_tests`: code is tested from outside, and cannot talk itself through."""

import asyncio
from typing import Any

import pytest

from treadle_agents.grading.python_tests import ExaminerLostError, PythonTests, code_of
from treadle_agents.sandbox import SandboxMissingError
from treadle_agents.sandbox.bubblewrap import Bubblewrap
from treadle_core.errors import InvalidFieldError

pytestmark = pytest.mark.processes

ADDS = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(1, 2) == 3\nassert add([1], [2]) == [1, 2]"


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> None:
    """Skips, with the reason, where this machine cannot have it."""

    async def try_it() -> None:
        async with Bubblewrap().open():
            pass

    try:
        asyncio.run(try_it())
    except SandboxMissingError as error:
        pytest.skip(error.message)


async def worth(answer: str, tests: Any = TESTS, **parameters: Any) -> float:
    return await PythonTests(**parameters).grade(answer, {"tests": tests})


async def test_code_that_passes_is_worth_one_and_other_code_nothing() -> None:
    assert await worth(ADDS) == 1
    assert await worth(f"So:\n```python\n{ADDS}```\nThat is it.") == 1
    assert await worth("def add(a, b):\n    return a - b") == 0
    assert await worth("def add(a, b:") == 0
    assert await worth("I would rather not") == 0


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        pytest.param("x = 1", "x = 1", id="no-fence"),
        pytest.param("```py\nx = 1\n```\n```\nx = 2\n```", "x = 2\n", id="the-last"),
        pytest.param("```python\nx = 1\n", "```python\nx = 1\n", id="open"),
    ],
)
def test_the_code_of_an_answer(answer: str, code: str) -> None:
    assert code_of(answer) == code


def test_a_caller_without_an_event_loop_waits() -> None:
    assert PythonTests()(ADDS, {"tests": TESTS}) == 1


CHEATS = {
    "is equal to everything": """
class Same:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def add(a, b): return Same()""",
    "is a number that is equal to everything": """
class Same(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def add(a, b): return Same(7)""",
    "ends the process well": "import os\nos._exit(0)",
    "ends the process when it is asked": "import sys\ndef add(a, b): sys.exit(0)",
    "raises what ends a program": "def add(a, b): raise SystemExit(0)",
    "changes what fails": """
import builtins
builtins.AssertionError = builtins.Exception = type("Never", (Exception,), {})
def add(a, b): return 0
def all(values): return True
def isinstance(value, kind): return True""",
    "changes the grader's files": """
import pathlib
for name in ("json", "math", "random", "treadle_agents/grading/examiner"):
    pathlib.Path(f"{name}.py").write_text("import os; os._exit(0)")
for file in pathlib.Path("treadle_agents").rglob("*.py"):
    file.write_text("raise SystemExit(0)")
def add(a, b): return 0""",
    "kills whoever tests": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "says that it passed": """
import json, os
for place in ("/proc/1/fd/1", f"/proc/{os.getppid()}/fd/1", "/proc/self/fd/1"):
    try:
        out = os.open(place, os.O_WRONLY)
    except OSError:
        continue
    for seal in ("", None, "0" * 32):
        os.write(out, json.dumps({"seal": seal, "passed": 1, "of": 1}).encode() + b"\\n")
def add(a, b): return 0""",
    "changes who calls": """
import gc, sys
for frame in sys._current_frames().values():
    while frame:
        frame.f_globals.update(add=lambda a, b: 3, answer={"value": 3})
        frame = frame.f_back
def add(a, b): return 0""",
    "answers with what is no value": "def add(a, b): return add",
    "fills its memory": "x = []\nwhile True: x.append(bytes(1 << 20))",
    "writes without end": "def add(a, b): return 'x' * 10**9",
}


@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS.keys())
async def test_code_that_does_not_add_is_worth_nothing_whatever_it_does(code: str) -> None:
    assert await worth(code) == 0


PEEKS = {
    "memory of the tests": "open(f'/proc/{os.getppid()}/mem', 'rb')",
    "descriptors of the tests": "os.listdir(f'/proc/{os.getppid()}/fd')",
    "environment of the tests": "open(f'/proc/{os.getppid()}/environ', 'rb').read()",
}


@pytest.mark.parametrize("peek", PEEKS.values(), ids=PEEKS.keys())
async def test_code_cannot_look_at_its_tests(peek: str) -> None:
    refused = f"import os\ntry:\n    {peek}\nexcept PermissionError:\n{ADDS}"
    refused = refused.replace("\ndef", "\n    def").replace("\n    return", "\n        return")
    assert await worth(refused) == 1


async def test_what_the_tests_were_told_is_not_told_again() -> None:
    told = """
import os
try:
    text = os.read(os.open("/proc/1/fd/0", os.O_RDONLY | os.O_NONBLOCK), 1000)
except PermissionError:
    text = b""
assert text == b""
"""
    assert await worth(told + ADDS) == 1


async def test_code_that_does_not_end_is_worth_nothing() -> None:
    assert await worth("while True: pass", seconds=1) == 0
    assert await worth("import time\ntime.sleep(600)", deadline_s=2) == 0


async def test_values_of_all_plain_kinds_cross_and_objects_stay() -> None:
    code = """
K = {"a": [1, None, float("inf"), (1, 2.5), {3}, frozenset({4}), b"5", 6j, True]}
class Counter:
    def __init__(self, start=0): self.value = start
    def count(self, by=1): self.value += by; return self.value
    def __iter__(self): yield from range(self.value)
    def __len__(self): return self.value
def same(value): return value
def fail(): raise KeyError("no")
def read(counter): return counter.value
"""
    tests = """
from solution import Counter as C, same
value = {"a": [1, None, float("inf"), (1, 2.5), {3}, frozenset({4}), b"5", 6j, True]}
assert solution.K == K == value and same(value) == value and same(10**5000) == 10**5000
counter = C(start=1)
assert counter.count(by=2) == counter.value == len(counter) == read(counter) == 3
assert list(counter) == [0, 1, 2] and bool(counter) and counter is not C(3)
try: fail()
except KeyError as error: assert "no" in str(error)
else: assert False
"""
    assert await worth(code, tests) == 1


async def test_each_named_test_counts_and_a_share_is_worth_a_share() -> None:
    tests = ["def test_a(): assert add(1, 1) == 2\ndef test_b(): assert add(1, 1) == 3", TESTS]
    assert await worth(ADDS, tests, partial=True) == pytest.approx(2 / 3)
    assert await worth(ADDS, tests) == 0


async def test_a_program_is_judged_by_what_it_prints() -> None:
    cases = [{"input": "3\n", "output": "6"}, {"input": "-4", "output": "-8\n"}]
    assert await worth("print(int(input()) * 2, '\\n')", cases) == 1
    assert await worth("print(6)", cases, partial=True) == 0.5
    assert await worth("print(int(input()) * 2); raise SystemExit(1)", cases) == 0
    assert await worth("while True: print('6' * 10**6)", cases, seconds=1) == 0


@pytest.mark.parametrize(
    "tests",
    [
        pytest.param("assert (", id="syntax"),
        pytest.param([{"input": "1"}], id="no-output"),
        pytest.param([3], id="a-number"),
        pytest.param({"input": "1"}, id="an-object"),
    ],
)
async def test_tests_that_are_none_are_no_wrong_answer(tests: Any) -> None:
    with pytest.raises(InvalidFieldError, match=r"task\.tests: expected tests"):
        await worth(ADDS, tests)


async def test_a_task_without_tests_is_no_wrong_answer() -> None:
    with pytest.raises(KeyError, match=r"task\.tests"):
        await PythonTests().grade(ADDS, {"prompt": "?"})


async def test_tests_that_cannot_begin_are_no_wrong_answer() -> None:
    with pytest.raises(ExaminerLostError):
        await worth(ADDS, deadline_s=0.001)


@pytest.mark.parametrize(
    ("sandbox", "says"),
    [
        pytest.param("no-such", "expected one of .*bubblewrap", id="unknown"),
        pytest.param({"name": "bubblewrap", "color": 1}, "sandbox bubblewrap", id="parameters"),
        pytest.param("none", "since nothing is isolated", id="none"),
    ],
)
def test_a_sandbox_that_cannot_be_had_is_refused_when_the_grader_is_made(sandbox, says) -> None:
    with pytest.raises(InvalidFieldError, match=says):
        PythonTests(sandbox=sandbox)
