"""Independent float64 expectations, computed from the formulas by loops over tokens."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from treadle_core.errors import InvalidFieldError
from treadle_trainer.core.advantages.grpo import Grpo
from treadle_trainer.core.logprobs import token_logprobs
from treadle_trainer.core.losses import token_mean
from treadle_trainer.core.losses.ppo_clip import PpoClip

GOLDEN = json.loads((Path(__file__).parent / "golden" / "cases.json").read_text())
SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def tensor(rows, dtype):
    return torch.tensor([[SPECIAL.get(x, x) for x in row] for row in rows], dtype=dtype)


def advantage(inputs, params, dtype):
    groups: dict[str, dict[str, float]] = {}
    rows = list(zip(inputs["rewards"], inputs["group_ids"], inputs["rollout_ids"], strict=True))
    for reward, group, rollout in rows:
        groups.setdefault(group, {}).setdefault(rollout, reward)
    values = {}
    for group, rewards in groups.items():
        found = Grpo()(np.array(list(rewards.values()), str(dtype).removeprefix("torch.")))
        values |= {(group, rollout): v for rollout, v in zip(rewards, found.values, strict=True)}
    column = torch.tensor([values[group, rollout] for _, group, rollout in rows], dtype=dtype)
    spread = column[:, None] * tensor(inputs["action_mask"], dtype)
    return {"advantages": spread, "returns": spread}


def policy_loss(inputs, params, dtype):
    loss = PpoClip(params["eps_low"], params["eps_high"], params["dual_clip"])
    mask = tensor(inputs["action_mask"], dtype).bool()
    logprobs = tensor(inputs["log_probs"], dtype).requires_grad_()
    arrays = (logprobs, *(tensor(inputs[n], dtype) for n in ("old_log_probs", "advantages")), mask)
    each = [
        [
            loss(*(a[i, j : j + 1] for a in arrays), num_tokens=1).loss.item()
            for j in range(mask.shape[1])
        ]
        for i in range(mask.shape[0])
    ]
    num_tokens = int(mask.sum())
    term = loss(*(array.flatten() for array in arrays), num_tokens=num_tokens)
    (grad,) = torch.autograd.grad(term.loss, logprobs)
    return {
        "token_loss": torch.tensor(each, dtype=dtype),
        "token_grad": grad * num_tokens,
        "clip_ratio": term.sums["clip_fraction"].double() / num_tokens,
        "policy_kl": term.sums["kl_k1"] / num_tokens,
    }


def aggregate(inputs, params, dtype):
    losses = tensor(inputs["token_loss"], dtype).requires_grad_()
    mask = tensor(inputs["action_mask"], dtype).bool()
    loss = token_mean(losses, mask, params["n_tokens"]) * params["dp_size"]
    (grad,) = torch.autograd.grad(loss, losses)
    return {"loss": loss.detach(), "grad": grad}


def token_logprob(inputs, params, dtype):
    logits = tensor(inputs["logits"], dtype).requires_grad_()
    temperatures = torch.full((len(logits),), params["temperature"], dtype=dtype)
    logprobs, entropy = token_logprobs(logits, torch.tensor(inputs["labels"]), temperatures)
    (grad,) = torch.autograd.grad(logprobs.sum(), logits)
    return {"log_probs": logprobs.detach(), "entropy": entropy, "grad": grad}


FUNCTIONS = {f.__name__: f for f in (advantage, policy_loss, aggregate, token_logprob)}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["id"])
def test_golden_case(case, precision):
    function, dtype = FUNCTIONS[case["function"]], DTYPES[precision]
    if "raises" in case["expect"]:
        with pytest.raises(InvalidFieldError):
            function(case["inputs"], case["params"], dtype)
        return
    found = function(case["inputs"], case["params"], dtype)
    tolerance = GOLDEN["default_tolerance"][precision]
    tolerance = case.get("tolerance", {}).get(precision, tolerance)
    for name, wanted in case["expect"].items():
        got, want = found[name], torch.tensor(wanted, dtype=dtype)
        if name in case.get("masked_outputs", ()):
            assert torch.isfinite(got).all()
            mask = tensor(case["inputs"]["action_mask"], dtype).bool()
            got, want = got[mask], want[mask]
        torch.testing.assert_close(got, want, **tolerance, check_dtype=False)
