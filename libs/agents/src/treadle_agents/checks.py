"""What an agent returned, as data: types, sizes and ranges, or a failure of the environment."""

import numbers
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from treadle_agents.env import Observation, Result
from treadle_agents.failures import EpisodeError
from treadle_core.episodes import MAX_REWARD, FailureClass
from treadle_core.media import MAX_MEDIA

MAX_TEXT = 4 * 1024 * 1024
"""Most characters of a prompt or observation."""
MAX_IMAGES_BYTES = 32 * 1024 * 1024
"""Most bytes of the images of one observation."""
MAX_METRICS = 64
"""Most metrics of an episode."""
MAX_METRIC_NAME = 128
"""Most characters of a metric's name."""

_NUMBER = f"a number in [-{MAX_REWARD:g}, {MAX_REWARD:g}]"


def check_text(field: str, value: object) -> str:
    """Returns `value` if it is text that can be encoded; raises EpisodeError naming `field`."""
    if not isinstance(value, str):
        raise _wrong(field, "text", type(value).__name__)
    if len(value) > MAX_TEXT:
        raise _wrong(field, f"at most {MAX_TEXT} characters", str(len(value)))
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _wrong(field, "valid Unicode", f"a lone surrogate at {error.start}") from error
    return str(value)


def check_observation(field: str, value: object) -> Observation:
    """Returns `value` if it is text, with images or without; raises EpisodeError naming `field`."""
    text = check_text(field, value)
    images = cast("tuple[object, ...]", value.images if isinstance(value, Observation) else ())
    if len(images) > MAX_MEDIA:
        raise _wrong(f"{field}.images", f"at most {MAX_MEDIA} images", str(len(images)))
    size = 0
    for place, image in enumerate(images):
        if not isinstance(image, bytes):
            raise _wrong(f"{field}.images[{place}]", "bytes", type(image).__name__)
        size += len(image)
    if size > MAX_IMAGES_BYTES:
        raise _wrong(f"{field}.images", f"at most {MAX_IMAGES_BYTES} bytes in all", str(size))
    return Observation(text, cast("tuple[bytes, ...]", images))


def check_result(value: object) -> Result:
    """Returns what `value` says, as plain numbers, text and truth values.

    Raises EpisodeError of class environment, `agent.result...: expected ...`.
    """
    if not isinstance(value, Result):
        raise _wrong("agent.result", "a treadle_agents.Result", type(value).__name__)
    reward = value.reward
    return Result(
        observation=check_observation("agent.result.observation", value.observation),
        reward=None if cast("object", reward) is None else _number("agent.result.reward", reward),
        terminated=_truth("agent.result.terminated", value.terminated),
        truncated=_truth("agent.result.truncated", value.truncated),
        metrics=_metrics(value.metrics),
    )


def check_sum(rewards: float) -> float:
    """Returns the reward of the episode if it is in range as well."""
    return _number("agent.result.reward, summed", rewards)


def check_metrics(metrics: Mapping[Any, Any]) -> None:
    """Refuses more metrics than an episode may have."""
    if len(metrics) > MAX_METRICS:
        raise _wrong("agent.result.metrics", f"at most {MAX_METRICS} names", str(len(metrics)))


def _metrics(value: object) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise _wrong("agent.result.metrics", "a mapping of names to numbers", type(value).__name__)
    metrics = cast("Mapping[object, object]", value)
    check_metrics(metrics)
    checked: dict[str, float] = {}
    for name, number in metrics.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_METRIC_NAME:
            limit = f"names of 1 to {MAX_METRIC_NAME} characters"
            raise _wrong("agent.result.metrics", limit, repr(name)[:MAX_METRIC_NAME])
        checked[check_text("agent.result.metrics", name)] = _number(
            f"agent.result.metrics.{name}", number
        )
    return checked


def _number(field: str, value: object) -> float:
    """A real number within range; NaN is in no range."""
    if not isinstance(value, numbers.Real):
        raise _wrong(field, _NUMBER, type(value).__name__)
    if not -MAX_REWARD <= cast("float", value) <= MAX_REWARD:
        raise _wrong(field, _NUMBER, _quoted(value))
    return float(value)


def _quoted(number: numbers.Real) -> str:
    try:
        return f"{float(number):g}"
    except OverflowError:
        return "a larger one"


def _truth(field: str, value: object) -> bool:
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(cast("object", value))
    raise _wrong(field, "True or False", type(value).__name__)


def _wrong(field: str, limit: str, value: str) -> EpisodeError:
    return EpisodeError(FailureClass.ENVIRONMENT, f"{field}: expected {limit}, got {value}")
