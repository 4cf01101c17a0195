from dataclasses import replace
from typing import Any

import pytest

from treadle_core.tickets import Sampling
from treadle_gateway.conversation import Ask, Wanted
from treadle_gateway.errors import RefusedError
from treadle_gateway.sampling import SamplingRule
from treadle_gateway.settings import OtherSampling

PLAIN = Wanted()
RECIPE = Sampling(temperature=0.8, max_tokens=100)
HOT = Wanted(temperature=1.2, top_p=0.9)


def rule(other_sampling: OtherSampling, *supported: str) -> SamplingRule:
    return SamplingRule(other_sampling, frozenset(supported))


def ask(wanted: Wanted = PLAIN, max_tokens: int | None = None) -> Ask:
    return Ask("policy", (), wanted=wanted, max_tokens=max_tokens)


@pytest.mark.parametrize(
    ("max_tokens", "room", "expected"),
    [
        pytest.param(None, 1000, 100, id="the recipe's"),
        pytest.param(128_000, 1000, 100, id="more than the recipe's"),
        pytest.param(7, 1000, 7, id="fewer"),
        pytest.param(None, 5, 5, id="no more than there is room for"),
    ],
)
def test_a_bound_of_tokens_is_only_ever_lowered(
    max_tokens: int | None, room: int, expected: int
) -> None:
    settled = rule("refuse").settle(ask(max_tokens=max_tokens), RECIPE, room=room)
    assert settled.sampling == Sampling(temperature=0.8, max_tokens=expected)
    assert settled.trained


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(),
        Wanted(temperature=0.8),
        Wanted(top_p=1.0, top_k=-1, min_p=0.0),
        Wanted(presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, logit_bias={}),
        Wanted(stop=("END",)),
    ],
    ids=str,
)
@pytest.mark.parametrize("other", ["refuse", "untrained", "recipe"])
def test_what_leaves_the_distribution_as_it_is_is_trained(
    wanted: Wanted, other: OtherSampling
) -> None:
    settled = rule(other).settle(ask(wanted), RECIPE, room=1000)
    assert (settled.sampling, settled.trained, settled.other) == (RECIPE, True, ())


def test_other_sampling_is_refused_with_its_field_and_the_key_that_allows_it() -> None:
    with pytest.raises(RefusedError, match=r"rollout\.gateway\.other_sampling") as refused:
        rule("refuse", "top_p").settle(ask(HOT), RECIPE, room=1000)
    assert refused.value.field == "temperature"


def test_other_sampling_is_honoured_and_not_trained() -> None:
    settled = rule("untrained", "top_p").settle(ask(HOT), RECIPE, room=1000)
    assert settled.sampling == Sampling(temperature=1.2, max_tokens=100, top_p=0.9)
    assert (settled.trained, settled.other) == (False, ("temperature", "top_p"))


def test_what_the_engine_cannot_do_is_refused_also_where_it_would_not_be_trained() -> None:
    with pytest.raises(RefusedError, match="top_p: the engine"):
        rule("untrained").settle(ask(HOT), RECIPE, room=1000)


def test_other_sampling_is_counted_where_the_recipes_is_used() -> None:
    settled = rule("recipe").settle(ask(HOT), RECIPE, room=1000)
    assert (settled.sampling, settled.trained) == (RECIPE, True)
    assert settled.other == ("temperature", "top_p")


@pytest.mark.parametrize("other", ["refuse", "untrained", "recipe"])
def test_a_schema_is_honoured_where_the_engine_can_and_never_trained(other: OtherSampling) -> None:
    wanted: Any = Wanted(schema={"type": "string"})
    settled = rule(other, "schema").settle(ask(wanted), RECIPE, room=1000)
    assert settled.sampling.schema == {"type": "string"}
    assert not settled.trained
    with pytest.raises(RefusedError, match="response_format"):
        rule(other).settle(ask(wanted), RECIPE, room=1000)


@pytest.mark.parametrize("other", ["refuse", "untrained", "recipe"])
def test_a_grammar_is_honoured_where_the_engine_can_and_never_trained(other: OtherSampling) -> None:
    wanted = Wanted(schema={"type": "string"})  # of words, of which there are none then
    settled = rule(other, "grammar").settle(ask(wanted), RECIPE, room=1000, grammar="start: x")
    assert settled.sampling == replace(RECIPE, grammar="start: x")
    assert (settled.trained, settled.other) == (False, ("grammar",))
    with pytest.raises(RefusedError, match="tool_choice: the engine") as refused:
        rule(other, "schema").settle(ask(), RECIPE, room=1000, grammar="start: x")
    assert refused.value.field == "tool_choice"
