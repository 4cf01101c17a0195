"""One optimiser step, from groups of episodes to new parameters. The heart of the trainer."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from treadle_core.episodes import Group, Segment
from treadle_core.errors import Kind, TreadleError
from treadle_trainer.core.advantages import Advantage
from treadle_trainer.core.losses import Loss
from treadle_trainer.core.packing import Example, MicroBatch, pack
from treadle_trainer.core.ranks import ALONE, Ranks
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
    num_media: int = 0
    """Segments that would have entered, and show media: no backend here sees any."""
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
    ranks: Ranks = ALONE,
) -> StepResult:
    """Updates the backend's parameters once, on all groups together.

    Where no token enters the loss nothing is updated. Each of several ranks is given all groups,
    and the segments of the episodes that it computes; the update is that of one rank with all.

    Raises:
        NonFiniteStepError: before any parameter was changed; the gradient is forgotten.
        InvalidFieldError: a segment cannot be trained.
    """
    result = update(
        backend,
        [example for group in groups for example in weigh(group, advantage)],
        loss=loss,
        settings=settings,
        learning_rate=learning_rate,
        ranks=ranks,
    )
    num_media = sum(_num_media(group, advantage) for group in groups)
    return replace(
        result,
        num_silent=sum(is_silent(group, advantage) for group in groups),
        num_media=sum(map(int, ranks.gather(str(num_media).encode()))),
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
    examples = [example for group in groups for example in weigh(group, advantage)]
    try:
        _gather(backend, examples, loss=loss, settings=settings, ranks=ranks)
    except NonFiniteStepError:
        return False
    backend.discard_gradient()
    return True


def weigh(group: Group, advantage: Advantage) -> list[Example]:
    """The segments that enter the loss, each with the advantage of its episode.

    One that shows media does not: without them its tokens have other log-probabilities.
    """
    entering = _entering(group, advantage)
    return [Example.of(segment, value) for segment, value in entering if not segment.media]


def _num_media(group: Group, advantage: Advantage) -> int:
    """Segments that `weigh` leaves out, of those with a token to train."""
    entering = _entering(group, advantage)
    return sum(bool(segment.media) and segment.num_trained > 0 for segment, _ in entering)


def _entering(group: Group, advantage: Advantage) -> list[tuple[Segment, float]]:
    """The segments of the episodes that enter, with the advantage of each."""
    advantages = advantage(rewards_of(group))
    return [
        (segment, float(value))
        for episode, value, enters in zip(
            group.episodes, advantages.values, advantages.enters, strict=True
        )
        for segment in episode.segments
        if enters
    ]


def is_silent(group: Group, advantage: Advantage) -> bool:
    """Whether no episode of the group enters the loss."""
    return not advantage(rewards_of(group)).enters.any()


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
    ranks: Ranks = ALONE,
) -> StepResult:
    """One optimiser update on examples; their loss is a mean over all tokens of the step.

    The denominator is counted over all ranks before the first forward pass, so that the gradient
    does not depend on how the examples fall into ranks and micro-batches.
    """
    result = _gather(backend, examples, loss=loss, settings=settings, ranks=ranks)
    if result.num_trained:
        backend.update(learning_rate)
    return result


def _gather(
    backend: Backend,
    examples: Sequence[Example],
    *,
    loss: Loss,
    settings: StepSettings,
    ranks: Ranks,
) -> StepResult:
    """Gathers and clips the gradient of the examples' loss; raises NonFiniteStepError."""
    mine = sum(example.num_trained for example in examples)
    num_tokens = sum(map(int, ranks.gather(str(mine).encode())))
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
    numbers = {name: float(value) for name, value in sums.items()}
    found = _summed(
        StepResult(
            float(total), num_trained=num_tokens, num_microbatches=len(microbatches), sums=numbers
        ),
        ranks,
    )
    if ranks.size > 1:
        backend.add_up_gradient(ranks)
    found = replace(found, grad_norm=backend.clip_gradient(settings.max_grad_norm))
    for name, value in (("loss", found.loss), ("grad_norm", found.grad_norm)):
        if not math.isfinite(value):
            backend.discard_gradient()
            raise NonFiniteStepError(
                f"{name} is {value}", field=name, limit="a finite number", value=value
            )
    return found


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
