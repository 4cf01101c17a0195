"""The promises about sampling beyond temperature: each for the engines that honour it."""

from typing import Any

import numpy as np

from treadle_agents.record import Generated
from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import SHAPES, Sampling
from treadle_rollout.conformance.subject import (
    TOLERANCE,
    Check,
    Ids,
    NotApplicableError,
    Subject,
    check_shapes,
    prompt,
    raises,
    require,
    serving,
)
from treadle_rollout.core.shaping import logprobs_of
from treadle_rollout.ports import Engine, GenerationRequest

_ASKED: tuple[dict[str, Any], ...] = (
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"logit_bias": {2: 2.5, 5: -100.0}},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.5},
    {"repetition_penalty": 1.7},
    {"top_k": 8, "top_p": 0.8, "min_p": 0.02, "seed": 7, "logit_bias": {1: 1.0}},
)
_EDGE = 1e-3
"""A token this near to where the kept ones end may fall on either side of it."""


async def what_is_honoured_shapes_what_is_sampled(subject: Subject) -> None:
    """Each token's log-probability is that of the distribution that it was sampled from."""
    async with serving(subject, slots=4, max_context=48) as engine:
        asked = [each for each in _ASKED if each.keys() <= engine.samplings]
        if not asked:
            raise NotApplicableError("it honours no sampling but temperature")
        for number, fields in enumerate(asked):
            sampling = Sampling(temperature=0.8 + 0.1 * number, max_tokens=8, **fields)
            ids = prompt(subject, 6, seed=number)
            turn = await engine.generate(GenerationRequest(f"s{number}", ids, sampling))
            check_shapes(turn)
            _check(subject, ids, turn, sampling)


def _check(subject: Subject, ids: Ids, turn: Generated, sampling: Sampling) -> None:
    for size, token in enumerate(turn.token_ids.tolist()):
        so_far = turn.token_ids[:size].tolist()
        logits = subject.logits(1, np.concatenate([ids, turn.token_ids[:size]])).astype(np.float64)
        expected = float(logprobs_of(logits, sampling, ids, so_far)[token])
        if abs(expected - turn.logprobs[size]) <= TOLERANCE:
            continue
        # Rounding may decide about one token more or less; a little more room must explain it.
        near = [
            float(logprobs_of(logits, _with_room(sampling, room), ids, so_far)[token])
            for room in (-_EDGE, _EDGE)
        ]
        close = any(abs(each - turn.logprobs[size]) <= TOLERANCE for each in near)
        require(close, f"{sampling.shaped}: expected {expected:.5f}, got {turn.logprobs[size]:.5f}")


def _with_room(sampling: Sampling, room: float) -> Sampling:
    return Sampling(
        temperature=sampling.temperature,
        top_p=min(sampling.top_p + room, 1.0) if sampling.top_p < 1 else 1.0,
        top_k=sampling.top_k,
        min_p=sampling.min_p and sampling.min_p + room,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
    )


async def a_call_with_a_seed_has_its_own_chance(subject: Subject) -> None:
    """The same whatever runs beside it and whatever was sampled before; another seed differs."""
    async with serving(subject, slots=2, max_context=48) as engine:
        if "seed" not in engine.samplings:
            raise NotApplicableError("it honours no seed")
        ids = prompt(subject, 4)
        said = [
            (await engine.generate(_seeded(ids, name, seed))).token_ids.tolist()
            for name, seed in (("a", 5), ("b", 5), ("c", 6))
        ]
        require(said[0] == said[1], "one seed, one turn")
        require(said[0] != said[2], "another seed, another turn")


def _seeded(ids: Ids, session: str, seed: int) -> GenerationRequest:
    return GenerationRequest(session, ids, Sampling(max_tokens=16, seed=seed))


async def what_is_not_honoured_is_refused(subject: Subject) -> None:
    """Never dropped; and what is honoured has its limits, and is named rightly."""
    async with serving(subject, slots=1, max_context=32) as engine:
        require(engine.samplings <= SHAPES, "samplings are fields of Sampling")
        wrong: dict[str, Any] = {
            "top_p": -0.1,
            "top_k": -2,
            "min_p": 1.5,
            "seed": 2**70,
            "presence_penalty": 3.0,
            "frequency_penalty": -3.0,
            "repetition_penalty": 0.0,
            "logit_bias": {subject.vocabulary: 1.0},
            "schema": {"type": "nonsense"},
            "grammar": "nonsense",
        }
        right: dict[str, Any] = {
            "top_p": 0.5,
            "top_k": 2,
            "min_p": 0.5,
            "seed": 1,
            "presence_penalty": 1.0,
            "frequency_penalty": 1.0,
            "repetition_penalty": 2.0,
            "logit_bias": {1: 1.0},
            "schema": {"type": "object"},
            "grammar": 'start: "a"',
        }
        for name in sorted(SHAPES):
            chosen = wrong if name in engine.samplings else right
            await _refused(engine, subject, name, chosen[name])


async def _refused(engine: Engine, subject: Subject, name: str, value: object) -> None:
    fields: dict[str, Any] = {name: value}
    call = GenerationRequest("a", prompt(subject, 3), Sampling(max_tokens=4, **fields))
    error = await raises(InvalidFieldError, engine.generate(call))
    require(error.field == name, f"the error names {name}, not {error.field}")


CHECKS: tuple[Check, ...] = (
    what_is_honoured_shapes_what_is_sampled,
    a_call_with_a_seed_has_its_own_chance,
    what_is_not_honoured_is_refused,
)
