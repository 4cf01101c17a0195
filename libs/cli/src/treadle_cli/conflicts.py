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
        *_ports(models),
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
    keys = ("rollout.engine.max_context", "trainer.microbatch_tokens")
    for longest, room in _known(models, *keys):
        if longest > room:
            yield (
                f"{keys[1]}: expected at least {longest} = {keys[0]}, since a segment is trained "
                f"in one piece, got {room}"
            )


def _publications(models: Mapping[str, BaseModel]) -> Iterable[str]:
    keys = ("experience.max_lag", "trainer.publish_every")
    for lag, every in _known(models, *keys):
        if every > lag + 1:
            yield (
                f"{keys[1]}: expected at most {lag + 1} = {keys[0]} + 1, since after so many "
                f"steps unpublished no task may be opened any more, got {every}"
            )


def _evaluations(models: Mapping[str, BaseModel]) -> Iterable[str]:
    keys = ("experience.evaluation.every", "trainer.publish_every", "experience.steps")
    for every, published, steps in _known(models, *keys):
        if every < steps and every % published:
            yield (
                f"{keys[0]}: expected a multiple of {published} = {keys[1]}, since only a step "
                f"that is published can be scored, got {every}"
            )


def _payloads(models: Mapping[str, BaseModel]) -> Iterable[str]:
    keys = (
        "trainer.checkpoint_every",
        "experience.tasks_per_step",
        "experience.group_size",
        "rollout.engine.max_context",
    )
    key = "experience.payload_budget_bytes"
    for budget, *parts in _known(models, key, *keys):
        needed = prod(parts, start=TOKEN_BYTES)
        if needed > budget:
            product = " * ".join(f"{k} {part}" for k, part in zip(keys, parts, strict=True))
            yield (
                f"{key}: expected at least {needed} = {product} * {TOKEN_BYTES} bytes a token, "
                f"since payloads are kept until a checkpoint covers them, got {budget}"
            )
    spool = "run.payloads.budget_bytes"
    for on_node, budget in _known(models, f"experience.{spool}", key):
        if on_node < budget:
            yield (
                f"{spool}: expected at least {key} {budget}, near which a checkpoint is asked for "
                f"so that payloads go, got {on_node}"
            )


def _ports(models: Mapping[str, BaseModel]) -> Iterable[str]:
    keys = ("rollout.gateway.port", "rollout.gateway.workers")
    for first, workers in _known(models, *keys):
        for name, model in models.items():
            port = getattr(model, "listen", "").rpartition(":")[2]
            if first and port.isdigit() and first <= int(port) < first + workers:
                yield (
                    f"{name}.listen: expected a port outside {first} to {first + workers - 1}, "
                    f"which {keys[0]} and {keys[1]} take, got {port}"
                )


def _known(models: Mapping[str, BaseModel], *keys: str) -> Iterable[tuple[int, ...]]:
    """The numbers that the keys hold, once; nothing where one of them holds none."""
    found = [_value(models, key) for key in keys]
    if all(isinstance(value, int) for value in found):
        yield tuple(found)


def _value(models: Mapping[str, BaseModel], key: str) -> Any:
    section, *names = key.split(".")
    value: Any = models.get(section)
    for name in names:
        plugin = isinstance(value, PluginConfig)
        value = value.parameters.get(name) if plugin else getattr(value, name, None)
    return value


def _said(plugin: Any) -> str:
    parameters = "".join(f", {key}: {value}" for key, value in plugin.parameters.items())
    return f"{{name: {plugin.name}{parameters}}}"
