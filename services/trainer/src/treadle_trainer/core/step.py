"""One optimiser step, from groups of episodes to new parameters. The heart of the trainer."""

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
from treadle_trainer.core.packing import Example, MicroBatch, pack
from treadle_trainer.ports import Backend


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
    sums: Mapping[str, float] = field(default_factory=dict[str, float])
    """Sums over those tokens: `entropy`, in nats, and the loss plugin's own."""


def train_step(
    backend: Backend,
    groups: Sequence[Group],
    *,
    advantage: Advantage,
    loss: Loss,
    settings: StepSettings,
    learning_rate: float,
) -> StepResult:
    """Updates the backend's parameters once, on all groups together.

    Where no token enters the loss nothing is updated.

    Raises:
        NonFiniteStepError: before any parameter was changed; the gradient is forgotten.
        InvalidFieldError: a segment cannot be trained.
    """
    weighed = [weigh(group, advantage) for group in groups]
    result = update(
        backend,
        [example for examples in weighed for example in examples],
        loss=loss,
        settings=settings,
        learning_rate=learning_rate,
    )
    return replace(result, num_silent=sum(not examples for examples in weighed))


def is_finite(
    backend: Backend,
    groups: Sequence[Group],
    *,
    advantage: Advantage,
    loss: Loss,
    settings: StepSettings,
) -> bool:
    """Whether loss and gradient of these groups alone are numbers. Changes no parameter."""
    examples = [example for group in groups for example in weigh(group, advantage)]
    try:
        _gather(backend, examples, loss=loss, settings=settings)
    except NonFiniteStepError:
        return False
    backend.discard_gradient()
    return True


def weigh(group: Group, advantage: Advantage) -> list[Example]:
    """The segments that enter the loss, each with the advantage of its episode."""
    advantages = advantage(rewards_of(group))
    return [
        Example.of(segment, float(value))
        for episode, value, enters in zip(
            group.episodes, advantages.values, advantages.enters, strict=True
        )
        for segment in episode.segments
        if enters
    ]


def rewards_of(group: Group) -> NDArray[np.float64]:
    """Rewards of the members, NaN where there is none, [n]."""
    return np.array([math.nan if e.reward is None else e.reward for e in group.episodes])


def update(
    backend: Backend,
    examples: Sequence[Example],
    *,
    loss: Loss,
    settings: StepSettings,
    learning_rate: float,
) -> StepResult:
    """One optimiser update on examples; their loss is a mean over all tokens of the step.

    The denominator is counted before the first forward pass, so that the gradient does not depend
    on how the examples fall into micro-batches.
    """
    result = _gather(backend, examples, loss=loss, settings=settings)
    if result.num_trained:
        backend.update(learning_rate)
    return result


def _gather(
    backend: Backend, examples: Sequence[Example], *, loss: Loss, settings: StepSettings
) -> StepResult:
    """Gathers and clips the gradient of the examples' loss; raises NonFiniteStepError."""
    num_tokens = sum(example.num_trained for example in examples)
    if not num_tokens:
        return StepResult()
    microbatches = pack(examples, max_tokens=settings.microbatch_tokens)
    total = torch.zeros((), dtype=torch.float64)
    sums: dict[str, torch.Tensor] = {}
    for microbatch in microbatches:
        term, part = _accumulate(backend, microbatch, loss, num_tokens)
        total += term
        for name, value in part.items():
            sums[name] = sums.get(name, 0) + value.double().cpu()
    grad_norm = backend.clip_gradient(settings.max_grad_norm)
    for name, value in (("loss", float(total)), ("grad_norm", grad_norm)):
        if not math.isfinite(value):
            backend.discard_gradient()
            raise NonFiniteStepError(
                f"{name} is {value}", field=name, limit="a finite number", value=value
            )
    return StepResult(
        loss=float(total),
        grad_norm=grad_norm,
        num_trained=num_tokens,
        num_microbatches=len(microbatches),
        sums={name: float(value) for name, value in sums.items()},
    )


def _accumulate(
    backend: Backend, microbatch: MicroBatch, loss: Loss, num_tokens: int
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Adds a micro-batch's gradient; returns its share of the loss and its sums."""
    logprobs, entropy = backend.logprobs(microbatch)
    device = logprobs.device
    term = loss(
        logprobs,
        torch.from_numpy(microbatch.logprobs).to(device),
        torch.from_numpy(microbatch.advantages).to(device),
        torch.ones_like(logprobs, dtype=torch.bool),
        num_tokens=num_tokens,
    )
    term.loss.backward()
    return term.loss.detach().double().cpu(), {**term.sums, "entropy": entropy.sum()}
