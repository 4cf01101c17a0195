"""Policy gradients of estimators beside the exact one, on a task that can be enumerated.

`python tests/numerics/bandit.py [--samples N] [--seed N]`. An episode says one or two tokens of a
vocabulary of four: the token 0 ends it. Its reward depends on all of them. The policy is a table
of logits, so the gradient of its expected reward is a sum over the thirteen episodes there are. Of
each estimator, N samples (20,000; a sample is a group of four episodes) give a gradient through the
trainer's own advantages, losses, corrections and aggregations.

One JSON line an estimator: |estimate - exact| / |exact|, with the part of it that chance explains
as `standard_error`; draws are stratified over groups, which leaves little to it. The goal, under
0.02, is for those that claim to be unbiased; the others are shown with their direction (`cosine`),
which is what an optimiser sees of them.
"""

import argparse
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from treadle_runtime.measures import NONE, Measure, report
from treadle_trainer.core.advantages import Advantage
from treadle_trainer.core.advantages.batch_mean import BatchMean
from treadle_trainer.core.advantages.dr_grpo import DrGrpo
from treadle_trainer.core.advantages.gae import gae
from treadle_trainer.core.advantages.grpo import Grpo
from treadle_trainer.core.advantages.reinforce import Reinforce as Returns
from treadle_trainer.core.advantages.reinforce import token_rewards
from treadle_trainer.core.advantages.reinforce_baseline import ReinforceBaseline
from treadle_trainer.core.advantages.rloo import Rloo
from treadle_trainer.core.aggregations import Aggregation, Shares, Window
from treadle_trainer.core.aggregations.constant_length import ConstantLength
from treadle_trainer.core.aggregations.sequence_mean import SequenceMean
from treadle_trainer.core.aggregations.token_mean import TokenMean
from treadle_trainer.core.corrections.gated import Gated
from treadle_trainer.core.corrections.tis import Tis
from treadle_trainer.core.losses import Loss
from treadle_trainer.core.losses.cispo import Cispo
from treadle_trainer.core.losses.ppo_clip import PpoClip
from treadle_trainer.core.losses.reinforce import Reinforce
from treadle_trainer.core.objective import Denominators, Measured, Objective

VOCABULARY, LENGTH, GROUP = 4, 2, 4
GOAL = 0.02
BATCHES = 20
"""Parts of the samples, whose spread tells the standard error."""

CONSTANT = ConstantLength(1)
ON_POLICY = Objective(form="decoupled", correction=Gated("off"))
CORRECTED = Objective(form="decoupled", correction=Gated("token", "mask", "ratio", None, None))
TRUNCATED = Objective(form="decoupled", correction=Tis(1.2))


@dataclass(frozen=True)
class Task:
    """Logits, [2, 4], of policy and sampler, and rewards, [4, 4]."""

    policy: torch.Tensor
    sampler: torch.Tensor
    rewards: np.ndarray[Any, np.dtype[np.float64]]

    @cached_property
    def exact(self) -> torch.Tensor:
        """Gradient of the expected reward by the policy's logits, [2, 4]."""
        logits = self.policy.clone().requires_grad_()
        logprobs = logits.log_softmax(-1)
        first, second = logprobs.exp()
        rewards = torch.from_numpy(self.rewards)
        ended = first[0] * rewards[0, 0]
        (grad,) = torch.autograd.grad(ended + (first[1:] @ rewards[1:] @ second), logits)
        return grad

    def sample(self, rng: np.random.Generator, groups: int, *, off_policy: bool) -> "Episodes":
        """Episodes of so many groups, in their order."""
        logits = self.sampler if off_policy else self.policy
        recorded = logits.log_softmax(-1)
        bounds = recorded.exp().cumsum(-1).numpy()
        # For each member of a group and each token by themselves, one draw in each stratum.
        strata = np.stack([rng.permutation(groups) for _ in range(GROUP * LENGTH)], 1)
        drawn = (strata + rng.random(strata.shape)) / groups
        drawn = drawn.reshape(groups * GROUP, LENGTH, 1)
        tokens = (drawn > bounds[:, :-1]).sum(-1)
        acts = np.stack([np.ones(len(tokens), np.bool_), tokens[:, 0] != 0], 1)
        rewards = self.rewards[tokens[:, 0], np.where(acts[:, 1], tokens[:, 1], 0)]
        return Episodes(tokens, acts, rewards, recorded)


@dataclass(frozen=True)
class Episodes:
    """n episodes."""

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    """[n, 2]."""
    acts: np.ndarray[Any, np.dtype[np.bool_]]
    """The token was said, [n, 2]."""
    rewards: np.ndarray[Any, np.dtype[np.float64]]
    """[n]."""
    recorded: torch.Tensor
    """Log-probabilities of the sampler, [2, 4]."""


@dataclass(frozen=True)
class Estimator:
    """What a recipe picks."""

    name: str
    advantage: Advantage | None
    """None: `gae`, with a critic that is wrong."""
    loss: Loss = Reinforce()  # noqa: RUF009
    objective: Objective = ON_POLICY
    aggregation: Aggregation = CONSTANT
    unbiased: bool = True
    scale: float = 1.0
    """How much smaller it is said to be: a mean that holds the reward takes some of it away."""
    off_policy: bool = False
    by_group: bool = True
    """Groups are of four; else the whole batch is one."""

    def gradient(self, task: Task, episodes: Episodes) -> torch.Tensor:
        """Of the expected reward by the policy's logits, [2, 4]."""
        logits = task.policy.clone().requires_grad_()
        logprobs = logits.log_softmax(-1)
        acts = torch.from_numpy(episodes.acts)
        places = torch.arange(LENGTH).expand(acts.shape)
        tokens = torch.from_numpy(episodes.tokens)
        counts, size = episodes.acts.sum(1), len(acts)
        groups = np.arange(size) // GROUP
        of_group = np.bincount(groups, counts).astype(np.int64)
        shares = Shares(counts, counts, of_group[groups])
        window = Window(int(counts.sum()), size, size, len(of_group))
        weights = torch.from_numpy(self.aggregation.weights(shares))
        measured = Measured(
            logprobs=logprobs[places, tokens].flatten(),
            recorded=episodes.recorded[places, tokens].flatten(),
            advantages=torch.from_numpy(self.advantages(episodes, groups, counts)).flatten(),
            weights=weights.repeat_interleave(LENGTH),
            mask=acts.flatten(),
            segments=torch.arange(size).repeat_interleave(LENGTH),
            entropy=torch.zeros(size * LENGTH, dtype=torch.float64),
        )
        over = Denominators(self.aggregation.normaliser(window), window.num_tokens)
        term = self.objective(self.loss, measured, over)
        (grad,) = torch.autograd.grad(-term.loss / self.scale, logits)
        return grad

    def advantages(self, episodes: Episodes, groups: Any, counts: Any) -> Any:
        """At each token, [n, 2]."""
        if self.advantage is None:
            values = np.full(episodes.acts.shape, 0.3)
            return gae(
                token_rewards(episodes.rewards, episodes.acts), values, episodes.acts
            ).advantages
        found = self.advantage(episodes.rewards, groups if self.by_group else None, counts)
        return np.repeat(found.values[:, None], LENGTH, 1)


PLAIN = Returns(whiten=False)
ESTIMATORS = (
    Estimator("reinforce", PLAIN),
    Estimator("rloo", Rloo()),
    Estimator("dr_grpo", DrGrpo(), scale=1 - 1 / GROUP),
    Estimator("batch_mean", BatchMean(), by_group=False),
    Estimator("gae", None),
    Estimator("rloo_ppo_clip", Rloo(), PpoClip(), Objective()),
    Estimator("rloo_cispo", Rloo(), Cispo(), Objective()),
    Estimator("rloo_token_mean", Rloo(), aggregation=TokenMean(), unbiased=False),
    Estimator("rloo_sequence_mean", Rloo(), aggregation=SequenceMean(), unbiased=False),
    Estimator("grpo", Grpo(), unbiased=False),
    Estimator("reinforce_baseline", ReinforceBaseline(), unbiased=False),
    Estimator("reinforce_whitened", Returns(), unbiased=False),
)
ONE_STEP = (
    Estimator("off_policy_corrected", Rloo(), objective=CORRECTED, off_policy=True),
    Estimator("off_policy_direct", Rloo(), PpoClip(1.0, 1e3), Objective(), off_policy=True),
    Estimator("off_policy_cispo", Rloo(), Cispo(1e3), Objective(), off_policy=True),
    Estimator("off_policy_tis", Rloo(), objective=TRUNCATED, off_policy=True, unbiased=False),
    Estimator("off_policy_uncorrected", Rloo(), off_policy=True, unbiased=False),
)
"""Off policy a token's ratio knows nothing of the tokens before it. So these are shown where the
second token does not matter to the reward."""


def tasks(rng: np.random.Generator) -> tuple[Task, Task]:
    """The one whose reward depends on both tokens, and the one where the first decides."""
    policy = torch.from_numpy(rng.normal(size=(LENGTH, VOCABULARY)))
    sampler = policy + torch.from_numpy(0.3 * rng.normal(size=policy.shape))
    rewards = rng.random((VOCABULARY, VOCABULARY))
    return Task(policy, sampler, rewards), Task(
        policy, sampler, rewards[:, :1].repeat(VOCABULARY, 1)
    )


def measure(estimator: Estimator, task: Task, samples: int, seed: int) -> Measure:
    """One line."""
    rng = np.random.default_rng(seed)
    parts = torch.stack(
        [
            estimator.gradient(
                task, task.sample(rng, samples // BATCHES, off_policy=estimator.off_policy)
            )
            for _ in range(BATCHES)
        ]
    )
    exact, found = task.exact, parts.mean(0)
    error = float((found - exact).norm() / exact.norm())
    spread = (parts.var(0).sum() / BATCHES).sqrt() / exact.norm()
    cosine = float((found * exact).sum() / found.norm() / exact.norm())
    details = {"standard_error": round(float(spread), 4), "cosine": round(cosine, 4)}
    goal = f"< {GOAL}" if estimator.unbiased else NONE
    return Measure(f"bandit_{estimator.name}", error, "of the exact gradient", goal, details)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    several, single = tasks(np.random.default_rng(arguments.seed))
    pairs = [(each, several) for each in ESTIMATORS] + [(each, single) for each in ONE_STEP]
    drawn = enumerate(pairs, arguments.seed + 1)
    return report(measure(each, task, arguments.samples, seed) for seed, (each, task) in drawn)


if __name__ == "__main__":
    sys.exit(main())
