"""What lies off the mask does not matter, whatever it is, and what is not there is 0 and no NaN."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_trainer.core.advantages import whiten
from treadle_trainer.core.advantages.gae import gae
from treadle_trainer.core.advantages.on_policy_distill import on_policy_distill
from treadle_trainer.core.advantages.reinforce import returns_to_go, token_rewards
from treadle_trainer.core.aggregations import weighted_mean
from treadle_trainer.core.corrections.gated import Gated
from treadle_trainer.core.corrections.mis import Mis
from treadle_trainer.core.corrections.tis import Tis
from treadle_trainer.core.kl import Kl
from treadle_trainer.core.losses.cispo import Cispo
from treadle_trainer.core.losses.clipped_value import clipped_value_loss
from treadle_trainer.core.losses.gspo import Gspo
from treadle_trainer.core.losses.ppo_clip import PpoClip
from treadle_trainer.core.losses.reinforce import Reinforce
from treadle_trainer.core.objective import Denominators, Measured, Objective
from treadle_trainer.core.score_centering import score_centering

LOSSES = [PpoClip(), PpoClip(dual_clip=3.0), Gspo(), Cispo(), Reinforce()]
OBJECTIVES = [
    Objective(),
    Objective(kl=Kl(0.1, "k3"), entropy_bonus=0.1),
    Objective(kl=Kl(0.1, "k2")),
    Objective(kl=Kl(0.1, "k1", "model")),
    Objective(form="decoupled", correction=Gated("off")),
    Objective(form="decoupled", correction=Tis()),
    Objective(form="decoupled", correction=Mis()),
    Objective(form="direct", correction=Mis()),
    Objective(form="decoupled", correction=Gated("seq", "mask", "ratio", 0.5, 2.0)),
    Objective(form="decoupled", correction=Gated("seq", "mask", "binary_kl", None, 0.01)),
    Objective(form="decoupled", correction=Gated("token", "mask", "tv", None, 0.1)),
]
GARBAGE = [float("nan"), float("inf"), float("-inf"), 1e30, -1e30]
NAMES = ("logprobs", "recorded", "advantages", "entropy", "proximal", "reference", "centring")
ROWS, LENGTH = 4, 6

quick = settings(max_examples=60, deadline=None)


def known(rng):
    """Arrays on a mask whose last row is empty."""
    arrays = {name: torch.from_numpy(rng.uniform(-2, -0.1, ROWS * LENGTH)) for name in NAMES}
    arrays["advantages"] += 1
    mask = torch.from_numpy(rng.random(ROWS * LENGTH) < 0.6)
    mask[-LENGTH:] = False
    return arrays, mask


def objective_of(objective, loss, arrays, mask, length=LENGTH):
    """Loss, derivatives by log-probabilities and entropies, and metrics."""
    given_ = {name: array.clone() for name, array in arrays.items()}
    free = [given_[name].requires_grad_() for name in ("logprobs", "entropy")]
    measured = Measured(
        **given_,
        weights=torch.ones_like(mask, dtype=torch.float64),
        mask=mask,
        segments=torch.arange(len(mask)) // length,
    )
    count = int(mask.sum())
    term = objective(loss, measured, Denominators(float(count), count))
    grads = torch.autograd.grad(term.loss, free, allow_unused=True)
    grads = [torch.zeros_like(mask).double() if g is None else g for g in grads]
    return term.loss.detach(), *grads, {n: v.item() for n, v in term.sums.items()}


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=range(len(OBJECTIVES)))
@given(seed=st.integers(0, 10_000), data=st.data())
@settings(max_examples=8, deadline=None)
def test_garbage_off_the_mask_moves_nothing(objective, loss, seed, data):
    arrays, mask = known(np.random.default_rng(seed))
    spoiled = {
        name: torch.where(mask, array, data.draw(st.sampled_from(GARBAGE)))
        for name, array in arrays.items()
    }
    wanted, found = (objective_of(objective, loss, each, mask) for each in (arrays, spoiled))
    for a, b in zip(found[:3], wanted[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert found[3] == wanted[3]
    for grad in found[1:3]:
        assert not grad[~mask].any()


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=range(len(OBJECTIVES)))
def test_masked_places_added_to_every_row_move_nothing(objective, loss):
    arrays, mask = known(np.random.default_rng(7))

    def padded(array, value):
        wide = torch.full((ROWS, LENGTH + 3), value, dtype=array.dtype)
        wide[:, 2:-1] = array.view(ROWS, LENGTH)
        return wide.flatten()

    wide = {name: padded(array, float("nan")) for name, array in arrays.items()}
    found = objective_of(objective, loss, wide, padded(mask, value=False), LENGTH + 3)
    wanted = objective_of(objective, loss, arrays, mask)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=0)
    for a, b in zip(found[1:3], wanted[1:3], strict=True):
        inner = a.view(ROWS, -1)[:, 2:-1].flatten()
        torch.testing.assert_close(inner, b, rtol=1e-12, atol=0)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=range(len(OBJECTIVES)))
def test_an_empty_step_is_0_with_gradient_0(objective, loss):
    arrays, mask = known(np.random.default_rng(5))
    found = objective_of(objective, loss, arrays, torch.zeros_like(mask))
    assert found[0] == 0
    assert not found[1].any()
    assert not found[2].any()


@given(seed=st.integers(0, 10_000), garbage=st.sampled_from(GARBAGE))
@quick
def test_garbage_off_the_mask_moves_no_advantage_and_no_value(seed, garbage):
    rng = np.random.default_rng(seed)
    mask = rng.random((3, 6)) < 0.5
    rewards, kl, values = rng.normal(size=3), rng.normal(size=(3, 6)), rng.normal(size=(3, 6))

    def everything(kl, values):
        at_tokens = token_rewards(rewards, mask, kl, kl_coefficient=0.1)
        estimate = gae(at_tokens, values, mask, gamma=0.9, lam=0.9)
        tensors = [torch.from_numpy(each) for each in (values, values + 0.1, values - 0.3, mask)]
        losses, clipped = clipped_value_loss(*tensors, clip=0.05)
        return [
            *(returns_to_go(at_tokens, mask, gamma=0.9, axis=axis) for axis in ("dense", "action")),
            *estimate,
            whiten(values, mask),
            on_policy_distill(kl, mask),
            losses.numpy(),
            clipped.numpy(),
        ]

    spoiled = [np.where(mask, each, garbage) for each in (kl, values)]
    for found, wanted in zip(everything(*spoiled), everything(kl, values), strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert not found[~mask].any()


@given(seed=st.integers(0, 10_000), mode=st.sampled_from(["none", "trunc", "clip", "mask"]))
@quick
def test_with_a_whole_vocabulary_the_expected_centred_gradient_is_0(seed, mode):
    """Tokens are sampled by q, weighed by f(p / q), and the reward is the same for all."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(1, 5))).requires_grad_()
    q = torch.from_numpy(rng.dirichlet(np.full(5, 3.0)))[None]
    logprobs = logits.log_softmax(-1)
    found = score_centering(
        logprobs, q.log(), torch.ones(1, dtype=torch.bool), mode=mode, low=0.8, high=1.3
    )
    ratio = (logprobs.exp() / q).detach()
    weight = {
        "none": torch.ones_like(ratio),
        "trunc": ratio.clamp(max=1.3),
        "clip": ratio.clamp(0.8, 1.3),
        "mask": ratio * ((ratio >= 0.8) & (ratio <= 1.3)),
    }[mode]
    # The loss of a token is -weight log p, and the correction is added to it.
    expected = -(q * weight * logprobs).sum() + found.corrections.sum()
    (grad,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-5)


def test_what_lies_off_the_mask_is_not_in_a_mean():
    losses = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    found = weighted_mean(losses, torch.ones(3), mask, 2.0)
    (grad,) = torch.autograd.grad(found, losses)
    assert found == 2
    assert grad.tolist() == [0.5, 0.0, 0.5]
