"""What shapes a token's distribution beside its temperature, for the rows of a batch that ask.

The same as `treadle_rollout.core.shaping`, for many rows at once and where the logits lie.

Shapes: M = rows of a batch, m = those that are shaped, V = vocabulary, T = tokens known of a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle_core.tickets import Sampling
from treadle_rollout.adapters.transformers_engine.grammar import Follower

_BELOW_ONE = 1 - 2.0**-22
"""Largest level of chance: no rounding lifts it to a token that was left out."""


class Shape:
    """The shaping of one call, from its first token to its last."""

    def __init__(self, sampling: Sampling, follower: Follower | None = None) -> None:
        """`follower` is there where the sampling says what a turn must be."""
        self.sampling = sampling
        self.follower = follower
        self.chance = None if sampling.seed is None else np.random.default_rng(sampling.seed)
        self.bias_ids = np.fromiter(sampling.logit_bias.keys(), np.int64)
        self.biases = np.fromiter(sampling.logit_bias.values(), np.float32)
        self.penalises = bool(
            {"presence_penalty", "frequency_penalty", "repetition_penalty"} & sampling.shaped
        )

    @property
    def broken(self) -> str:
        """Why it cannot be followed any further; empty while it can."""
        return self.follower.broken if self.follower else ""


class Drawn(NamedTuple):
    """A row whose next token is sampled now."""

    row: int
    """In the batch, 0 <= row < M."""
    shape: Shape
    known: NDArray[np.int64]
    """Prompt and turn so far, [T]."""
    prompt: int
    """How many of them are the prompt."""


def rows_of(drawn: Sequence[Drawn], device: torch.device) -> Tensor:
    """The shaped rows, [m]."""
    return torch.tensor([each.row for each in drawn], device=device)


def moved(logits: Tensor, drawn: Sequence[Drawn]) -> Tensor:
    """What acts before the temperature: biases, penalties and grammars. Takes and gives [m, V]."""
    logits = logits.clone()
    if biased := [(i, each.shape) for i, each in enumerate(drawn) if each.shape.bias_ids.size]:
        cells = _cells(logits, [(i, shape.bias_ids) for i, shape in biased])
        biases = np.concatenate([shape.biases for _, shape in biased])
        logits.index_put_(cells, _there(biases, logits), accumulate=True)
    if penalised := [(i, each) for i, each in enumerate(drawn) if each.shape.penalises]:
        _penalise(logits, penalised)
    followed = [(i, f) for i, each in enumerate(drawn) if (f := each.shape.follower) is not None]
    if followed:
        left_out = np.stack([~follower.allowed() for _, follower in followed])
        rows = [i for i, _ in followed]
        logits[rows] = logits[rows].masked_fill(_there(left_out, logits), -torch.inf)
    return logits


def kept(logits: Tensor, drawn: Sequence[Drawn]) -> Tensor:
    """-inf in place of what min_p, top_k and top_p leave out, in this order; [m, V]."""
    samplings = [each.shape.sampling for each in drawn]
    shares = np.array([sampling.min_p for sampling in samplings], np.float32)
    if shares.any():
        with np.errstate(divide="ignore"):
            below = _there(np.log(shares), logits)
        least = logits.max(-1, keepdim=True).values + below[:, None]
        logits = logits.masked_fill(logits < least, -torch.inf)
    size = logits.shape[1]
    most = np.array([sampling.top_k or size for sampling in samplings])
    if few := np.flatnonzero(most < size).tolist():
        logits[few] = _likeliest(logits[few], most[few])
    masses = np.array([sampling.top_p for sampling in samplings], np.float32)
    if heads := np.flatnonzero(masses < 1).tolist():
        logits[heads] = _head(logits[heads], _there(masses[heads], logits))
    return logits


def own_levels(levels: Tensor, drawn: Sequence[Drawn]) -> Tensor:
    """Chance of its own for each call that has a seed; levels in [0, 1), [M, 1]."""
    for each in drawn:
        if each.shape.chance is not None:
            levels[each.row, 0] = float(each.shape.chance.random(dtype=np.float32))
    return levels.clamp_(max=_BELOW_ONE)


def take(drawn: Sequence[Drawn], token_ids: NDArray[np.int64]) -> None:
    """Tells the grammars which tokens were sampled, [M]."""
    for each in drawn:
        if each.shape.follower is not None:
            each.shape.follower.take(int(token_ids[each.row]))


def _penalise(logits: Tensor, drawn: Sequence[tuple[int, Drawn]]) -> None:
    """Changes the rows of `logits`, [m, V], that are named, in place."""
    seen = [np.unique(each.known) for _, each in drawn]
    cells = _cells(logits, [(i, ids) for (i, _), ids in zip(drawn, seen, strict=True)])
    factors = [each.shape.sampling.repetition_penalty for _, each in drawn]
    of_cell = np.repeat(np.array(factors, np.float32), [ids.size for ids in seen])
    factor, values = _there(of_cell, logits), logits[cells]
    logits[cells] = torch.where(values > 0, values / factor, values * factor)
    said = [np.unique(each.known[each.prompt :], return_counts=True) for _, each in drawn]
    cells = _cells(logits, [(i, ids) for (i, _), (ids, _) in zip(drawn, said, strict=True)])
    off = [
        _off(each.shape.sampling, times) for (_, each), (_, times) in zip(drawn, said, strict=True)
    ]
    logits[cells] -= _there(np.concatenate(off), logits)


def _off(sampling: Sampling, times: NDArray[np.int64]) -> NDArray[np.float32]:
    """What tokens lose that were sampled so many times."""
    off = sampling.presence_penalty + sampling.frequency_penalty * times
    return off.astype(np.float32)


def _cells(
    logits: Tensor, ids_of: Sequence[tuple[int, NDArray[np.int64]]]
) -> tuple[Tensor, Tensor]:
    """Row and column of tokens, by the row that they are of."""
    rows = np.repeat([i for i, _ in ids_of], [ids.size for _, ids in ids_of])
    return _there(rows, logits), _there(np.concatenate([ids for _, ids in ids_of]), logits)


def _likeliest(logits: Tensor, most: NDArray[np.int64]) -> Tensor:
    top = logits.topk(int(most.max()), -1).values
    least = top.gather(1, _there(most - 1, logits)[:, None])
    return logits.masked_fill(logits < least, -torch.inf)


def _head(logits: Tensor, masses: Tensor) -> Tensor:
    """The fewest likeliest tokens of each row that have its mass, [m]."""
    ranked, order = logits.sort(stable=True, dim=-1, descending=True)
    probabilities = ranked.softmax(-1)
    out = probabilities.cumsum(-1) - probabilities >= masses[:, None]
    out[:, 0] = False
    return logits.masked_fill(torch.zeros_like(out).scatter(1, order, out), -torch.inf)


def _there(values: NDArray[np.generic], logits: Tensor) -> Tensor:
    return torch.from_numpy(values).to(logits.device)
