"""What a step minimises: the loss of each token, corrected and weighted, and what is added to it.

L = (sum of coefficient_t weight_t loss_t) / normaliser
    + kl.coefficient (mean over tokens of kl_t) - entropy_bonus (mean over tokens of entropy_t)

Shapes: T = predicted tokens of a micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from treadle_core.errors import InvalidFieldError
from treadle_trainer.core.aggregations import Aggregation, weighted_mean
from treadle_trainer.core.aggregations.token_mean import TokenMean
from treadle_trainer.core.corrections import Correction
from treadle_trainer.core.kl import Kl
from treadle_trainer.core.losses import Loss, Tokens
from treadle_trainer.core.mismatch import mismatch_sums

Form = Literal["direct", "decoupled"]
"""What the ratio of the loss is taken to. `direct`: the policy that sampled, as recorded; what a
correction rejects is left out. `decoupled`: the trainer's policy before the step; a correction's
coefficients stand for the way from there to the sampler (arXiv 2110.00641)."""


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What is known of the tokens of a micro-batch, [T] each."""

    logprobs: Tensor
    """Under the present parameters, with gradient."""
    recorded: Tensor
    """Under the distribution that sampled."""
    advantages: Tensor
    weights: Tensor
    """Of the aggregation."""
    mask: Tensor
    """bool; a token outside adds nothing."""
    segments: Tensor
    """Number of the token's segment, ascending from 0."""
    entropy: Tensor
    """In nats; with gradient where there is a bonus for it."""
    proximal: Tensor | None = None
    """Under the parameters before the step; None where those are the present ones."""
    reference: Tensor | None = None
    """Under the reference model."""
    centring: Tensor | None = None
    """`score_centering`, times the advantage added to the loss."""


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counted over the whole step, all ranks."""

    normaliser: float
    """Of the aggregation."""
    num_tokens: int
    """Of KL and entropy, and of metrics."""


@dataclass(frozen=True, slots=True, eq=False)
class LossTerm:
    """What some of a step's tokens add to its loss and to its metrics."""

    loss: Tensor
    """Scalar with gradient; the terms of a step sum to its loss."""
    sums: Mapping[str, Tensor]
    """Sums over the tokens, scalars without gradient, by the metric that their mean is."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What the losses of tokens become part of."""

    aggregation: Aggregation = field(default_factory=TokenMean)
    form: Form = "direct"
    correction: Correction | None = None
    kl: Kl | None = None
    entropy_bonus: float = 0.0
    """What the mean entropy is multiplied with."""

    def __post_init__(self) -> None:
        """Refuses what would be silently wrong."""
        if not 0 <= self.entropy_bonus < float("inf"):
            limit = "finite and >= 0"
            raise InvalidFieldError("entropy_bonus", limit=limit, value=self.entropy_bonus)
        if self.form == "decoupled" and self.correction is None:
            limit = "one with form decoupled, else nothing makes up for lag (level off says so)"
            raise InvalidFieldError("correction", limit=limit, value=None)
        weighs = self.correction is not None and not self.correction.rejects
        if self.form == "direct" and weighs:
            limit = "decoupled with a correction that weighs: the ratio of form direct weighs too"
            raise InvalidFieldError("form", limit=limit, value=self.form)

    def __call__(self, loss: Loss, measured: Measured, over: Denominators) -> LossTerm:
        """The term of a micro-batch."""
        logprobs, mask = measured.logprobs, measured.mask
        proximal = logprobs.detach() if measured.proximal is None else measured.proximal
        old = measured.recorded if self.form == "direct" else proximal
        tokens = Tokens(logprobs, old, measured.advantages, mask, measured.segments)
        found = loss(tokens)
        losses, sums = found.losses, {**found.sums}
        if self.correction is not None:
            corrected = self.correction(proximal, measured.recorded, mask, measured.segments)
            kept = (mask & ~corrected.rejected_tokens).to(losses.dtype)
            losses = torch.where(mask, losses, 0.0)
            losses = losses * (kept if self.form == "direct" else corrected.coefficients)
            sums["rejected"] = corrected.rejected_tokens.sum()
        if measured.centring is not None:
            losses = losses + measured.centring * tokens.finite_advantages
        total = weighted_mean(losses, measured.weights, mask, over.normaliser)
        if self.kl is not None and self.kl.as_loss:
            total = total + self._kl_term(self.kl, measured, over, sums)
        if self.entropy_bonus:
            mean = _mean(measured.entropy, mask, over.num_tokens)
            total = total - self.entropy_bonus * mean
        with torch.no_grad():
            sums["entropy"] = torch.where(mask, measured.entropy, 0.0).sum()
        return LossTerm(total, sums | mismatch_sums(proximal, measured.recorded, mask))

    def _kl_term(
        self, kl: Kl, measured: Measured, over: Denominators, sums: dict[str, Tensor]
    ) -> Tensor:
        reference = measured.recorded if kl.reference == "rollout" else measured.reference
        if reference is None:
            limit = "rollout: there are no log-probabilities of a model"
            raise InvalidFieldError("kl.reference", limit=limit, value=kl.reference)
        kl_T = kl(measured.logprobs, reference, measured.mask)
        sums["kl_loss"] = kl_T.detach().sum()
        return kl.coefficient * _mean(kl_T, measured.mask, over.num_tokens)


def _mean(values_T: Tensor, mask_T: Tensor, num_tokens: int) -> Tensor:
    return torch.where(mask_T, values_T, 0.0).sum() / max(num_tokens, 1)
