from pathlib import Path

import pytest
import torch

from treadle_core.errors import InvalidFieldError
from treadle_runtime import plugins
from treadle_runtime.plugins import PluginConfig
from treadle_trainer.core.losses import Tokens

PATH = Path(__file__).parents[1] / "custom_loss.py"


def smooth(**parameters):
    config = PluginConfig(name=f"{PATH}:Smooth", **parameters)
    assert plugins.check("treadle.losses", config) == []
    return plugins.build("treadle.losses", config)


def test_the_loss_is_found_by_its_file_and_its_gradient_is_that_of_the_paper():
    logprobs = torch.tensor([-1.0, -1.0, -2.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0, -1.5, -1.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    mask, segments = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    found = smooth(tau_negative=2.0)(Tokens(logprobs, old, advantages, mask, segments))
    (grad,) = torch.autograd.grad(found.losses.sum(), logprobs)
    ratio = (logprobs - old).exp().detach()
    gate = torch.sigmoid(torch.tensor([1.0, 1.0, 2.0]) * (ratio - 1))
    torch.testing.assert_close(grad, -4 * gate * (1 - gate) * ratio * advantages)
    assert grad[0] == -1  # on-policy: the policy gradient


def test_a_gate_that_does_not_close_is_refused():
    with pytest.raises(InvalidFieldError, match="tau_positive: expected > 0"):
        smooth(tau_positive=0.0)
