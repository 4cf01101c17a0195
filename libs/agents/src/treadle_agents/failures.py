"""Failed episodes: whose fault, and what happened in words that are safe to store."""

import re
import traceback
from pathlib import Path

from treadle_core.episodes import FailureClass

_MAX_MESSAGE = 600
_MAX_FRAMES = 6
_SECRET = re.compile(
    r"(?i)\b([\w-]*(?:key|token|secret|password|authorization)[\w-]*\s*[=:]\s*)(?:bearer\s+)?\S+"
)


class EpisodeError(Exception):
    """An episode failed; `failure_class` says whose fault it is, `message` what happened."""

    def __init__(self, failure_class: FailureClass, message: str) -> None:
        super().__init__(message)
        self.failure_class = failure_class
        self.message = message


def describe(error: BaseException) -> str:
    """The error and where it arose, innermost last, in at most some 1,200 characters.

    Neither source lines, nor values of variables, nor folders; what looks like a secret in the
    error's own text is masked.
    """
    frames = traceback.extract_tb(error.__traceback__)[-_MAX_FRAMES:]
    where = "".join(
        f"\n  {Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames
    )
    return f"{type(error).__name__}: {_text_of(error)}{where}"


def _text_of(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001, the error's class is the agent's code
        text = f"(its text raised {type(broken).__name__})"
    text = _SECRET.sub(r"\1***", text[: 2 * _MAX_MESSAGE])
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "…"
