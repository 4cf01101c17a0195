from dataclasses import replace

import bandit
import numpy as np
import pytest
import torch

from treadle_trainer.core.losses.ppo_clip import PpoClip
from treadle_trainer.core.objective import Objective

CLAIMS = [each for each in (*bandit.ESTIMATORS, *bandit.ONE_STEP) if each.unbiased]
BY_NAME = {each.name: each for each in (*bandit.ESTIMATORS, *bandit.ONE_STEP)}
SEVERAL, SINGLE = bandit.tasks(np.random.default_rng(0))


def found(estimator):
    task = SINGLE if estimator.off_policy else SEVERAL
    return bandit.measure(estimator, task, 20_000, seed=1)


def test_the_exact_gradient_is_that_of_the_episodes_one_by_one():
    logits = SEVERAL.policy.clone().requires_grad_()
    first, second = logits.log_softmax(-1)
    total = first[0].exp() * SEVERAL.rewards[0, 0]
    for a in range(1, 4):
        for b in range(4):
            total = total + (first[a] + second[b]).exp() * SEVERAL.rewards[a, b]
    (grad,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(SEVERAL.exact, grad)


@pytest.mark.parametrize("estimator", CLAIMS, ids=lambda each: each.name)
def test_what_claims_to_be_unbiased_is_within_two_in_a_hundred(estimator):
    measure = found(estimator)
    assert measure.holds, measure


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(replace(BY_NAME["dr_grpo"], scale=1.0), id="a-baseline-of-its-own-reward"),
        pytest.param(
            replace(BY_NAME["off_policy_direct"], objective=bandit.ON_POLICY), id="no-ratio"
        ),
        pytest.param(
            replace(
                BY_NAME["off_policy_corrected"], objective=Objective(), loss=PpoClip(0.01, 0.01)
            ),
            id="a-tight-clip",
        ),
        pytest.param(
            replace(BY_NAME["rloo"], aggregation=bandit.SequenceMean()), id="a-mean-over-lengths"
        ),
    ],
)
def test_what_is_biased_is_seen(planted):
    assert not found(planted).holds
