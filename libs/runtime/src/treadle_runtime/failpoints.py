"""Named places at which a service can be told to fail: what a crash there leaves is then tested.

TREADLE_FAILPOINTS lists what to do where, separated by commas: `NAME=exit:STATUS` (at once, like a
kill), `NAME=raise`, `NAME=sleep:SECONDS` (its thread stands still) or `NAME=stop` (the process
does, until SIGCONT); `@N` at the end waits for the N-th hit. With TREADLE_FAILPOINTS_SPENT, a
directory, each name acts once, over all processes and restarts, and leaves a file of its name
there. Services read both when they start.
"""

import ast
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from treadle_core.errors import InvalidFieldError

ENVIRONMENT = "TREADLE_FAILPOINTS"
SPENT = "TREADLE_FAILPOINTS_SPENT"

_FORM = "NAME=exit:STATUS, NAME=raise, NAME=sleep:SECONDS or NAME=stop, then perhaps @HIT"
_ENTRY = re.compile(
    r"(?P<name>[a-z0-9_.]+)=(?:(?P<exit>exit):(?P<status>\d{1,3})|(?P<raise>raise)"
    r"|(?P<stop>stop)|(?P<sleep>sleep):(?P<seconds>\d+(?:\.\d+)?))(?:@(?P<hit>[1-9]\d*))?"
)


class FailpointError(RuntimeError):
    """What `raise` raises. Nothing expects it, as nothing expects a bug."""


@dataclass(slots=True)
class _Action:
    """What one name does; `hits_left` counts down to the hit that acts, and on."""

    kind: str
    amount: float
    hits_left: int
    spent: Path | None


_armed: dict[str, _Action] = {}


def failpoint(name: str) -> None:
    """Fails here if the process was told to; `name` is `service.operation.moment`."""
    if _armed:
        _hit(name)


def arm(environment: Mapping[str, str]) -> None:
    """Reads what to do where; nothing is armed without the variable. Raises InvalidFieldError."""
    _armed.clear()
    spent = environment.get(SPENT)
    for entry in filter(None, environment.get(ENVIRONMENT, "").split(",")):
        found = _ENTRY.fullmatch(entry.strip())
        if found is None:
            raise InvalidFieldError(ENVIRONMENT, limit=_FORM, value=entry)
        kind = found["exit"] or found["raise"] or found["stop"] or found["sleep"]
        amount = float(found["status"] or found["seconds"] or 0)
        mark = Path(spent) / found["name"] if spent else None
        _armed[found["name"]] = _Action(kind, amount, int(found["hit"] or 1), mark)


def _hit(name: str) -> None:
    action = _armed.get(name)
    if action is None:
        return
    action.hits_left -= 1
    if action.hits_left != 0 or not _first(action.spent):
        return
    if action.kind == "exit":
        os._exit(int(action.amount))
    if action.kind == "raise":
        raise FailpointError(f"failpoint {name}")
    if action.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(action.amount)


def _first(mark: Path | None) -> bool:
    """Whether no process has acted under this name before."""
    if mark is None:
        return True
    try:
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    except FileExistsError:
        return False
    return True


def names_in(files: Iterable[Path]) -> list[str]:
    """Every name that the code in `files` calls `failpoint` with, sorted, once per call.

    Raises ValueError where a name is no literal: it could not be listed.
    """
    found: list[str] = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        if "failpoint(" in text:
            found += _calls(ast.parse(text), path)
    return sorted(found)


def _calls(tree: ast.Module, path: Path) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if called != "failpoint":
                continue
            (argument,) = node.args
            if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
                raise ValueError(  # noqa: TRY004, wrong content of a file, not of a call
                    f"{path}:{node.lineno}: the name of a failpoint is a literal"
                )
            yield argument.value
