"""Runs hidden tests against code that nobody vouches for, inside a box.

A program of the standard library alone. Reads one JSON object: `code`, `tests`, the `seconds` of
processor time that the code has for each, and a `seal`. Says `begun`, and at the end one JSON
object: the seal, how many tests there were `of` and how many were `passed`, or an `error` of the
tests themselves. The code runs in other processes, which may neither read nor write this one's
memory, and never sees the tests: calls cross, and plain values. So it cannot pass by being equal to
everything, by ending the tests, by changing what compares, or by saying that it passed.
"""

import builtins
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import types
from functools import partialmethod
from pathlib import Path
from typing import Any

from treadle_agents.grading.crossing import pack, unpack

_SET_DUMPABLE = 4  # of prctl(2)
_MOST = 4 * 1024 * 1024
"""Most characters of one result."""
CODE = "solution.py"
Test = types.CodeType | tuple[str, str]
"""A test's program; or what the code reads, and what it has to print."""
FORWARDED = ("__iter__", "__next__", "__len__", "__bool__", "__contains__", "__getitem__")
"""What is done there when it is done to an object of the code's, besides calls."""


class GoneError(Exception):
    """The code's process has ended."""


class Code:
    """The code in a process, while one test runs."""

    def __init__(self, seconds: float) -> None:
        """Starts it; raises GoneError where it does not come up."""
        theirs, self._calls = os.pipe()
        self._results, told = os.pipe()
        self._process = subprocess.Popen(  # noqa: S603, in the box
            [*_subject("serve", seconds), str(theirs), str(told)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs, told),
        )
        os.close(theirs)
        os.close(told)
        self._ask = os.fdopen(self._calls, "w", encoding="utf-8")
        self._told = os.fdopen(self._results, encoding="utf-8")
        self.names = [str(name) for name in self._next()["names"]]

    def call(self, target: int, name: str, *arguments: Any, **named: Any) -> Any:
        """Calls a method of an object of the code's."""
        return self._cross(
            {"object": target, "name": name}
            | {"arguments": pack(list(arguments), _number), "named": pack(named, _number)}
        )

    def get(self, target: int, name: str) -> Any:
        """An attribute of an object of the code's."""
        return self._cross({"object": target, "name": name})

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        self._told.close()
        with contextlib.suppress(BrokenPipeError):
            self._ask.close()

    def _cross(self, asked: dict[str, Any]) -> Any:
        try:
            self._ask.write(json.dumps(asked) + "\n")
            self._ask.flush()
        except BrokenPipeError as error:
            raise GoneError("the code's process has ended") from error
        answer = self._next()
        if "raised" in answer:
            raise _raised(answer["raised"], str(answer["text"]))
        return unpack(answer["value"], lambda number: Theirs(self, int(number)))

    def _next(self) -> dict[str, Any]:
        line = self._told.readline(_MOST)
        if not line.endswith("\n"):
            raise GoneError("the code's process has ended, or said too much")
        return dict(json.loads(line))


class Theirs:
    """An object of the code's: whatever is done with it is done there. Equal to itself alone."""

    def __init__(self, code: Code, number: int) -> None:
        self._code = code
        self._number = number

    def __getattr__(self, name: str) -> Any:
        return self._code.get(self._number, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._code.call(self._number, "__call__", *arguments, **named)

    @property
    def crossing(self) -> int:
        """What it is called there."""
        return self._number

    def forwarded(self, name: str, *arguments: Any) -> Any:
        """Calls a method that Python itself would call."""
        try:
            return self._code.call(self._number, name, *arguments)
        except AttributeError as error:  # which is how Python says that there is no such method
            raise TypeError(str(error)) from error


for method in FORWARDED:
    setattr(Theirs, method, partialmethod(Theirs.forwarded, method))


class Solution(types.ModuleType):
    """The module `solution`, as tests import it."""

    def __init__(self, code: Code) -> None:
        super().__init__("solution")
        self.__dict__["_code"] = code

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._code.names:
            raise AttributeError(f"the code has no {name}")
        return self._code.get(0, name)


def check(test: Any) -> Test:
    """A test as it can be run; raises what is wrong with it."""
    if isinstance(test, str):
        return compile(test, "tests", "exec")
    return str(test["input"]), str(test["output"])


def examine(test: Test, seconds: float) -> tuple[int, int]:
    """How many of the tests in `test` passed, and how many there are."""
    try:
        if isinstance(test, tuple):
            return int(_printed(test[0], test[1], seconds)), 1
        code = Code(seconds)
        try:
            return _passed(test, code)
        finally:
            code.close()
    except Exception:  # noqa: BLE001, whatever the code does when it is loaded
        return 0, 1


def _passed(program: types.CodeType, code: Code) -> tuple[int, int]:
    """Runs a test's source, then the functions in it that are called test_something."""
    solution = Solution(code)
    sys.modules["solution"] = solution
    space: dict[str, Any] = {"__name__": "tests", "solution": solution}
    for name in code.names:
        # What compares and counts is Python's own, whatever the code calls its functions.
        if not hasattr(builtins, name) and name not in sys.stdlib_module_names:
            space[name] = code.get(0, name)
    if not _succeeds(lambda: exec(program, space)):  # noqa: S102, the tests are the task's
        return 0, 1
    named = [each for name, each in space.items() if name.startswith("test_")]
    ours = [each for each in named if isinstance(each, types.FunctionType)]
    return (sum(map(_succeeds, ours)), len(ours)) if ours else (1, 1)


def _succeeds(test: Any) -> bool:
    try:
        test()
    except SystemExit as ended:
        return not ended.code
    except BaseException:  # noqa: BLE001, a test may fail with anything
        return False
    return True


def _printed(given: str, right: str, seconds: float) -> bool:
    """Whether the code, run as a program, answers what it is given with what is right."""
    with tempfile.TemporaryFile() as output:  # of a bounded folder
        done = subprocess.run(  # noqa: S603, in the box
            _subject("run", seconds),
            input=given.encode(),
            stdout=output,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        output.seek(0)
        said = output.read(_MOST).decode(errors="replace")
    return done.returncode == 0 and _lines(said) == _lines(right)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _raised(kinds: list[Any], text: str) -> Exception:
    """The nearest of Python's own exceptions to one that the code raised."""
    for kind in kinds:
        known = getattr(builtins, str(kind), None)
        if isinstance(known, type) and issubclass(known, Exception):
            with contextlib.suppress(TypeError):  # it takes more than a text
                return known(text)
    return RuntimeError(text)


def _subject(mode: str, seconds: float) -> list[str]:
    return [sys.executable, "-m", "treadle_agents.grading.subject", mode, str(seconds), CODE]


def _number(value: object) -> int:
    if isinstance(value, Theirs):
        return value.crossing
    raise TypeError(f"tests can give code plain values and its own objects, not {type(value)}")


def main() -> None:
    """Examines; see the module."""
    asked = json.load(sys.stdin)
    # From here on nobody of the same user may look into this process.
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    # Nor is anything imported from the folder that the code may write to.
    sys.path[:] = [place for place in sys.path if place.startswith(sys.base_prefix)]
    verdicts, sys.stdout = sys.stdout, sys.stderr
    sys.set_int_max_str_digits(0)
    verdicts.write("begun\n")
    verdicts.flush()
    Path(CODE).write_text(asked["code"], encoding="utf-8")
    told: dict[str, Any] = {"seal": asked["seal"]}
    try:
        tests = asked["tests"] if isinstance(asked["tests"], list) else [asked["tests"]]
        checked = [check(test) for test in tests]
    except (SyntaxError, ValueError, LookupError, TypeError) as error:
        told["error"] = f"{type(error).__name__}: {error}"
    else:
        found = [examine(test, asked["seconds"]) for test in checked]
        told |= {"passed": sum(each[0] for each in found), "of": sum(each[1] for each in found)}
    verdicts.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
