"""The code under test, in a process of its own inside a box: started by the examiner.

    subject run SECONDS CODE                  as a program, with our standard streams
    subject serve SECONDS CODE CALLS RESULTS  answers calls on two descriptors

SECONDS of processor time are all that it may take. What it answers is its own word for it.
"""

import json
import os
import resource
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from treadle_agents.grading.crossing import pack, unpack


class Subject:
    """A module made of the code, and the objects that the tests hold of it."""

    def __init__(self, file: str) -> None:
        """Runs the code as a module called `solution`."""
        module = ModuleType("solution")
        sys.modules["solution"] = module
        execute(file, module.__dict__)
        self._objects: list[Any] = [module]

    def names(self) -> list[str]:
        """What the module offers."""
        names = cast("dict[str, object]", vars(self._objects[0]))
        return [name for name in names if not name.startswith("_")]

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What a call led to."""
        target = self._objects[asked["object"]]
        if asked["name"] == "__bool__":
            return {"value": bool(target)}
        found = getattr(target, asked["name"])
        if "arguments" in asked:
            arguments = unpack(asked["arguments"], self._objects.__getitem__)
            named = unpack(asked["named"], self._objects.__getitem__)
            found = found(*arguments, **named)
        return {"value": pack(found, self._keep)}

    def _keep(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1


def serve(file: str, calls: int, results: int) -> None:
    """Answers until there are no more calls."""
    with os.fdopen(calls) as asked, os.fdopen(results, "w") as told:
        subject = Subject(file)
        answer: dict[str, Any] = {"names": subject.names()}
        while True:
            told.write(json.dumps(answer) + "\n")
            told.flush()
            line = asked.readline()
            if not line:
                return
            try:
                answer = subject.answer(json.loads(line))
            except Exception as error:  # noqa: BLE001, told to the tests
                kinds = [kind.__name__ for kind in type(error).__mro__]
                answer = {"raised": kinds, "text": str(error)}


def execute(file: str, space: dict[str, Any]) -> None:
    """Runs the code with `space` as its names."""
    source = Path(file).read_text(encoding="utf-8")
    exec(compile(source, file, "exec"), space)  # noqa: S102, what this process is for


def main() -> None:
    """Runs or serves."""
    mode, seconds, file = sys.argv[1:4]
    limit = int(float(seconds)) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    sys.set_int_max_str_digits(0)
    if mode == "serve":
        serve(file, *map(int, sys.argv[4:6]))
        return
    sys.argv[:] = [file]
    execute(file, {"__name__": "__main__", "__file__": file})


if __name__ == "__main__":
    main()
