"""What is asked of a box: commands and files, checked before and after."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import BinaryIO, cast

from treadle_core.errors import InvalidFieldError

MAX_COMMAND = 128 * 1024
"""Most bytes of a command with its environment, as JSON."""
MAX_NAME = 512
"""Most characters of a file's name with its folders."""


def checked(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, object]:
    """Both as they are, if they can be started; raises InvalidFieldError."""
    if isinstance(command, str) or not command or not command[0]:
        raise InvalidFieldError("command", limit="a program and its arguments", value=command)
    texts = cast("list[object]", [*command, *environment, *environment.values()])
    if not all(isinstance(text, str) and "\0" not in text for text in texts):
        raise InvalidFieldError("command", limit="text without NUL", value="another")
    if not all(name and "=" not in name for name in environment):
        raise InvalidFieldError("environment", limit="names without =", value=[*environment])
    request: dict[str, object] = {"command": list(command), "environment": dict(environment)}
    size = len(json.dumps(request))
    if size > MAX_COMMAND:
        raise InvalidFieldError("command", limit=f"at most {MAX_COMMAND} bytes", value=size)
    return request


def check_name(name: str) -> None:
    """Raises InvalidFieldError where a name leads out of its folder, or is none."""
    if "\0" in name or len(name) > MAX_NAME or not {"", ".", ".."}.isdisjoint(name.split("/")):
        limit = f"a path below the folder, of at most {MAX_NAME} characters"
        raise InvalidFieldError("name", limit=limit, value=repr(name[:MAX_NAME]))


def in_memory(content: bytes) -> BinaryIO:
    """A file without a name that holds `content`, to be read from its start."""
    file = os.fdopen(os.memfd_create("content"), "w+b", 0)
    file.write(content)
    file.seek(0)
    return file


def content_of(name: str, fetched: BinaryIO, most: int) -> bytes:
    """What was fetched from the file called `name`; raises InvalidFieldError if it is too much."""
    fetched.seek(0)
    content = fetched.read()
    if len(content) > most:
        raise InvalidFieldError("name", limit=f"a file of at most {most} bytes", value=name)
    return content


def refused(name: str, why: str) -> InvalidFieldError:
    """A file could not be written or read."""
    return InvalidFieldError(
        "name", limit="a regular file, or room for one", value=f"{name}: {why}"
    )
