"""What each section of a recipe may say, and all of them together may not."""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from pydantic import BaseModel

from treadle_runtime.plugins import PluginConfig

TOKEN_BYTES = 17
"""Of a payload, for each of its tokens: the arrays of a segment, at most."""


def conflicts(models: Mapping[str, BaseModel]) -> list[str]:
    """Names both keys and the reason, a line each. A section that is not there is not judged."""
    return [
        *_transports(models),
        *_segments(models),
        *_publications(models),
        *_evaluations(models),
        *_payloads(models),
    ]


def _transports(models: Mapping[str, BaseModel]) -> Iterable[str]:
    chosen = {
        f"{name}.transport": transport
        for name, model in models.items()
        if isinstance(transport := getattr(model, "transport", None), PluginConfig)
    }
    (first, expected), *others = chosen.items() if chosen else [("", None)]
    for key, transport in others:
        if transport != expected:
            yield (
                f"{key}: expected {_said(expected)} as {first}, since one puts the bytes where the "
                f"other looks for them, got {_said(transport)}"
            )


def _segments(models: Mapping[str, BaseModel]) -> Iterable[str]:
    engine = getattr(models.get("rollout"), "engine", None)
    longest = engine.parameters.get("max_context") if isinstance(engine, PluginConfig) else None
    room = getattr(models.get("trainer"), "microbatch_tokens", None)
    if isinstance(longest, int) and isinstance(room, int) and longest > room:
        yield (
            f"trainer.microbatch_tokens: expected at least {longest} = rollout.engine.max_context, "
            f"since a segment is trained in one piece, got {room}"
        )


def _publications(models: Mapping[str, BaseModel]) -> Iterable[str]:
    lag = getattr(models.get("experience"), "max_lag", None)
    every = getattr(models.get("trainer"), "publish_every", None)
    if isinstance(lag, int) and isinstance(every, int) and every > lag + 1:
        yield (
            f"trainer.publish_every: expected at most {lag + 1} = experience.max_lag + 1, since "
            f"after so many steps unpublished no task may be opened any more, got {every}"
        )


def _evaluations(models: Mapping[str, BaseModel]) -> Iterable[str]:
    experience = models.get("experience")
    steps = getattr(experience, "steps", None)
    every = getattr(getattr(experience, "evaluation", None), "every", None)
    published = getattr(models.get("trainer"), "publish_every", None)
    if not (isinstance(steps, int) and isinstance(every, int) and isinstance(published, int)):
        return
    if every < steps and every % published:
        yield (
            f"experience.evaluation.every: expected a multiple of {published} = "
            f"trainer.publish_every, since only a step that is published can be scored, got {every}"
        )


def _payloads(models: Mapping[str, BaseModel]) -> Iterable[str]:
    experience, trainer = models.get("experience"), models.get("trainer")
    engine = getattr(models.get("rollout"), "engine", None)
    parts = {
        "trainer.checkpoint_every": getattr(trainer, "checkpoint_every", None),
        "experience.tasks_per_step": getattr(experience, "tasks_per_step", None),
        "experience.group_size": getattr(experience, "group_size", None),
        "rollout.engine.max_context": (
            engine.parameters.get("max_context") if isinstance(engine, PluginConfig) else None
        ),
    }
    budget = getattr(experience, "payload_budget_bytes", None)
    numbers = [part for part in parts.values() if isinstance(part, int)]
    if len(numbers) < len(parts) or not isinstance(budget, int):
        return
    needed = prod(numbers, start=TOKEN_BYTES)
    if needed > budget:
        product = " * ".join(f"{key} {part}" for key, part in parts.items())
        yield (
            f"experience.payload_budget_bytes: expected at least {needed} = {product} * "
            f"{TOKEN_BYTES} bytes a token, since payloads are kept until a checkpoint covers them, "
            f"got {budget}"
        )


def _said(plugin: Any) -> str:
    parameters = "".join(f", {key}: {value}" for key, value in plugin.parameters.items())
    return f"{{name: {plugin.name}{parameters}}}"
