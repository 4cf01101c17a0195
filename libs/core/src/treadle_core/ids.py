"""Names of runs, tasks and episodes: short, safe in paths and subjects, derived where possible."""

import hashlib
import re

from treadle_core.errors import InvalidFieldError

ID_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,128}")
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")


def checked_id(field: str, value: str) -> str:
    """Returns `value` if it is a legal id; raises InvalidFieldError naming `field` otherwise."""
    if not ID_PATTERN.fullmatch(value):
        raise InvalidFieldError(field, limit=ID_PATTERN.pattern, value=repr(value[:160]))
    return value


def is_sha256(value: str) -> bool:
    """Whether `value` is 64 lower-case hex digits."""
    return SHA256_PATTERN.fullmatch(value) is not None


def checked_sha256(value: str, field: str = "sha256") -> str:
    """Returns `value` if it is 64 lower-case hex digits; raises InvalidFieldError otherwise."""
    if not is_sha256(value):
        raise InvalidFieldError(field, limit=SHA256_PATTERN.pattern, value=repr(value[:80]))
    return value


def episode_id(run_id: str, task_id: str, index: int) -> str:
    """The id of episode `index` of a task: the same for each of its attempts."""
    return hashlib.sha256(f"{run_id}/{task_id}/{index}".encode()).hexdigest()[:32]
