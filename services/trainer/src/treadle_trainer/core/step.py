"""One optimiser step, from groups of episodes to new parameters. The heart of the trainer."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from treadle_core.episodes import Group
from treadle_core.errors import Kind, TreadleError
from treadle_trainer.core.advantages import Advantage
from treadle_trainer.core.losses import Loss
from treadle_trainer.core.objective import Denominators, LossTerm, Measured, Objective
from treadle_trainer.core.packing import Example, MicroBatch, pack
from treadle_trainer.core.ranks import ALONE, Ranks
from treadle_trainer.core.shaping import Shaping
from treadle_trainer.core.weighing import Weighed, weigh_step
from treadle_trainer.ports import Backend

QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99, "ratio_max": 1.0}
"""Metrics: quantiles, over the trained tokens, of probability now over probability recorded."""


class NonFiniteStepError(TreadleError):
    """Loss or gradient of a step is no number; no parameter was changed."""

    kind = Kind.BROKEN
    reason = "NON_FINITE_STEP"


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What does not change from step to step."""

    microbatch_tokens: int
    """Most tokens of one forward and backward pass; does not change the gradient."""
    max_grad_norm: float
    """Global norm that the gradient is clipped to."""
    objective: Objective = field(default_factory=Objective)
    """What the losses of tokens become part of."""
    shaping: Shaping = field(default_factory=Shaping)
    """What is made of rewards before advantages."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did, in numbers."""

    loss: float = 0.0
    grad_norm: float = 0.0
    """Global norm before clipping."""
    num_trained: int = 0
    """Tokens that entered the loss."""
    num_microbatches: int = 0
    num_silent: int = 0
    """Groups of which no episode entered: equal rewards, or too few."""
    num_media: int = 0
    """Segments that would have entered, and show media: no backend here sees any."""
    reward_shaped: float | None = None
    """Mean of the shaped rewards; None where rewards are not shaped, or there are none."""
    sums: Mapping[str, float] = field(default_factory=dict[str, float])
    """Sums over those tokens: `entropy`, in nats, and those of loss and objective."""
    spreads: Mapping[str, float] = field(default_factory=dict[str, float])
    """`QUANTILES`; and of the advantages of the episodes that entered `advantage_std`, the
    population's, and `advantage_max`, of their magnitudes."""


def train_step(
    backend: Backend,
    groups: Sequence[Group],
    *,
    advantage: Advantage,
    loss: Loss,
    settings: StepSettings,
    learning_rate: float,
    ranks: Ranks = ALONE,
) -> StepResult:
    """Updates the backend's parameters once, on all groups together.

    Where no token enters the loss nothing is updated. Each of several ranks is given all groups,
    and the segments of the episodes that it computes; the update is that of one rank with all.

    Raises:
        NonFiniteStepError: before any parameter was changed; the gradient is forgotten.
        InvalidFieldError: a segment cannot be trained.
    """
    weighed = _weighed(groups, advantage, settings, ranks)
    result = _gather(backend, weighed, loss=loss, settings=settings, ranks=ranks)
    if result.num_trained:
        backend.update(learning_rate)
    return replace(
        result,
        num_silent=sum(weighed.silent),
        num_media=weighed.num_media,
        reward_shaped=weighed.reward_shaped if settings.shaping.shapes else None,
        spreads={**result.spreads, **weighed.spreads} if result.num_trained else {},
    )


def is_finite(
    backend: Backend,
    groups: Sequence[Group],
    *,
    advantage: Advantage,
    loss: Loss,
    settings: StepSettings,
    ranks: Ranks = ALONE,
) -> bool:
    """Whether loss and gradient of these groups alone are numbers. Changes no parameter."""
    weighed = _weighed(groups, advantage, settings, ranks)
    try:
        _gather(backend, weighed, loss=loss, settings=settings, ranks=ranks)
    except NonFiniteStepError:
        return False
    backend.discard_gradient()
    return True


def silent(
    groups: Sequence[Group],
    *,
    advantage: Advantage,
    settings: StepSettings,
    ranks: Ranks = ALONE,
) -> tuple[bool, ...]:
    """Of each group of a step, whether no episode of it enters the loss."""
    return _weighed(groups, advantage, settings, ranks).silent


def _weighed(
    groups: Sequence[Group], advantage: Advantage, settings: StepSettings, ranks: Ranks
) -> Weighed:
    aggregation = settings.objective.aggregation
    return weigh_step(groups, advantage, aggregation, ranks, shaping=settings.shaping)


def update(
    backend: Backend,
    examples: Sequence[Example],
    *,
    loss: Loss,
    settings: StepSettings,
    learning_rate: float,
    ranks: Ranks = ALONE,
) -> StepResult:
    """One optimiser update on examples as they are; their loss is a mean over all their tokens.

    The denominator is counted over all ranks before the first forward pass, so that the gradient
    does not depend on how the examples fall into ranks and micro-batches.
    """
    mine = sum(example.num_trained for example in examples)
    num_tokens = sum(map(int, ranks.gather(str(mine).encode())))
    weighed = Weighed(tuple(examples), Denominators(num_tokens, num_tokens))
    result = _gather(backend, weighed, loss=loss, settings=settings, ranks=ranks)
    if result.num_trained:
        backend.update(learning_rate)
    return result


def _gather(
    backend: Backend,
    weighed: Weighed,
    *,
    loss: Loss,
    settings: StepSettings,
    ranks: Ranks,
) -> StepResult:
    """Gathers and clips the gradient of the examples' loss; raises NonFiniteStepError."""
    over = weighed.denominators
    if not over.num_tokens:
        return StepResult()
    microbatches = pack(weighed.examples, max_tokens=settings.microbatch_tokens)
    total = torch.zeros((), dtype=torch.float64)
    sums: dict[str, torch.Tensor] = {}
    log_ratios: list[NDArray[np.floating]] = []
    for microbatch in microbatches:
        term, logprobs = _accumulate(backend, microbatch, loss, settings.objective, over)
        total += term.loss.detach().double().cpu()
        for name, value in term.sums.items():
            sums[name] = sums.get(name, 0) + value.double().cpu()
        log_ratios.append(logprobs.float().cpu().numpy() - microbatch.logprobs)
    numbers = {name: float(value) for name, value in sums.items()}
    found = _summed(
        StepResult(
            float(total),
            num_trained=over.num_tokens,
            num_microbatches=len(microbatches),
            sums=numbers,
            spreads=_quantiles(log_ratios, ranks),
        ),
        ranks,
    )
    if ranks.size > 1:
        backend.add_up_gradient(ranks)
    found = replace(found, grad_norm=backend.clip_gradient(settings.max_grad_norm))
    _check_finite(backend, found)
    return found


def _check_finite(backend: Backend, found: StepResult) -> None:
    """Raises NonFiniteStepError, with the gradient forgotten, where loss or norm is no number."""
    for name, value in (("loss", found.loss), ("grad_norm", found.grad_norm)):
        if not math.isfinite(value):
            backend.discard_gradient()
            raise NonFiniteStepError(
                f"{name} is {value}", field=name, limit="a finite number", value=value
            )


def _summed(mine: StepResult, ranks: Ranks) -> StepResult:
    """The results of all ranks together, in what each adds to them."""
    said = json.dumps([mine.loss, mine.num_microbatches, dict(mine.sums)]).encode()
    loss, microbatches, sums = 0.0, 0, dict[str, float]()
    for part, count, numbers in map(json.loads, ranks.gather(said)):
        loss += part
        microbatches += count
        for name, value in numbers.items():
            sums[name] = sums.get(name, 0.0) + value
    return replace(mine, loss=loss, num_microbatches=microbatches, sums=sums)


def _quantiles(mine: Sequence[NDArray[np.floating]], ranks: Ranks) -> dict[str, float]:
    """Quantiles of the ratios of all ranks; none where a log-ratio is no number."""
    said = np.concatenate([np.empty(0, np.float32), *mine]).astype(np.float32).tobytes()
    log_ratios = np.frombuffer(b"".join(ranks.gather(said)), np.float32)
    if not np.isfinite(log_ratios).all():
        return {}
    found = np.exp(np.quantile(log_ratios.astype(np.float64), list(QUANTILES.values())))
    return dict(zip(QUANTILES, found.tolist(), strict=True))


def _accumulate(
    backend: Backend,
    microbatch: MicroBatch,
    loss: Loss,
    objective: Objective,
    over: Denominators,
) -> tuple[LossTerm, torch.Tensor]:
    """Adds a micro-batch's gradient; returns its share of the loss, and its log-probabilities."""
    if objective.entropy_bonus:
        logprobs, entropy = backend.logprobs(microbatch, entropy_gradient=True)
    else:
        logprobs, entropy = backend.logprobs(microbatch)
    device = logprobs.device
    measured = Measured(
        logprobs=logprobs,
        recorded=torch.from_numpy(microbatch.logprobs).to(device),
        advantages=torch.from_numpy(microbatch.advantages).to(device),
        weights=torch.from_numpy(microbatch.weights).to(device),
        mask=torch.ones_like(logprobs, dtype=torch.bool),
        segments=torch.from_numpy(microbatch.owners).to(device),
        entropy=entropy,
    )
    term = objective(loss, measured, over)
    term.loss.backward()
    return term, logprobs.detach()
