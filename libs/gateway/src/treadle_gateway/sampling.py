"""How a reply is sampled: the recipe's way, or the client's where the recipe lets it; pure."""

from dataclasses import dataclass, replace
from typing import Any

from treadle_core.tickets import CONSTRAINTS, SHAPES, Sampling
from treadle_gateway.conversation import Ask, Wanted
from treadle_gateway.errors import RefusedError
from treadle_gateway.settings import OTHER_SAMPLING_KEY, OtherSampling

_NAMES = ("temperature", *sorted(SHAPES - CONSTRAINTS))


@dataclass(frozen=True, slots=True)
class Settled:
    """How a reply is sampled, and what that means for training."""

    sampling: Sampling
    trained: bool
    """The distribution is the recipe's."""
    other: tuple[str, ...] = ()
    """What the client wanted otherwise, and got or did not get."""


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """What a worker does with sampling that is not the recipe's."""

    other_sampling: OtherSampling
    supported: frozenset[str]
    """Fields of Sampling, beside temperature and max_tokens, that the engine honours."""

    def settle(self, ask: Ask, recipe: Sampling, *, room: int, grammar: str = "") -> Settled:
        """How the reply to `ask` is sampled; `room` is the most tokens that it may have.

        `grammar` is what the reply is to be where a tool is to be called; a schema is about words,
        of which there are none then. Raises RefusedError naming the field that cannot be honoured.
        """
        most = min(recipe.max_tokens, room, ask.max_tokens or room)
        constraint: dict[str, Any] = {}
        if grammar:
            self._support("grammar", "tool_choice")
            constraint["grammar"] = grammar
        elif ask.wanted.schema is not None:
            self._support("schema", "response_format")
            constraint["schema"] = dict(ask.wanted.schema)
        other = _differing(ask.wanted, recipe)
        if other and self.other_sampling == "refuse":
            raise _not_the_recipes(*next(iter(other.items())))
        honoured = constraint
        if self.other_sampling == "untrained":
            for name in other:
                self._support(name, name)
            honoured = other | constraint
        sampling = replace(recipe, max_tokens=most, **honoured)
        return Settled(sampling, trained=not honoured, other=(*other, *constraint))

    def _support(self, name: str, field: str) -> None:
        if name not in self.supported and name != "temperature":
            raise RefusedError(
                "invalid",
                f"{field}: the engine of this run cannot do that",
                field=field,
                code="unsupported_parameter",
            )


def _not_the_recipes(name: str, value: object) -> RefusedError:
    return RefusedError(
        "invalid",
        f"{name}: {value!r} is not how this run samples, and what is sampled so cannot be trained "
        f"on; leave it out, or set {OTHER_SAMPLING_KEY} to untrained or recipe",
        field=name,
        code="unsupported_sampling",
    )


def _differing(wanted: Wanted, recipe: Sampling) -> dict[str, Any]:
    """What the client states and the recipe has otherwise."""
    stated = {name: value for name in _NAMES if (value := getattr(wanted, name)) is not None}
    if stated.get("top_k") == -1:  # another word for all
        stated["top_k"] = 0
    if not wanted.logit_bias:
        del stated["logit_bias"]
    return {name: value for name, value in stated.items() if value != getattr(recipe, name)}
