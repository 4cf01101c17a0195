"""What holds on a CPU holds on a GPU."""

import numpy as np
import pytest
import torch

from treadle_trainer.adapters.single import SingleBackend
from treadle_trainer.core.advantages.rloo import Rloo
from treadle_trainer.core.corrections.gated import Gated
from treadle_trainer.core.corrections.mis import Mis
from treadle_trainer.core.corrections.tis import Tis
from treadle_trainer.core.kl import Kl
from treadle_trainer.core.losses.cispo import Cispo
from treadle_trainer.core.losses.gspo import Gspo
from treadle_trainer.core.losses.ppo_clip import PpoClip
from treadle_trainer.core.losses.reinforce import Reinforce
from treadle_trainer.core.objective import Objective
from treadle_trainer.core.packing import lay_out
from treadle_trainer.core.step import StepSettings, train_step, update

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ARCHITECTURES = ["qwen3", "llama", "gpt2", "sliding"]


def steps(backend, examples, count, microbatch_tokens=1000):
    for _ in range(count):
        result = update(
            backend,
            examples,
            loss=PpoClip(),
            settings=StepSettings(microbatch_tokens, 1.0),
            learning_rate=1e-3,
        )
    return result


def parameters(backend):
    return {name: tensor.cpu() for name, tensor in backend.parameters().items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_are_those_of_the_cpu(policies, architecture, make_examples):
    batch = lay_out(make_examples(np.random.default_rng(0), 6))
    found = {}
    for device in ("cpu", "cuda"):
        with torch.no_grad():
            logprobs, entropy = SingleBackend(policies[architecture], device=device).logprobs(batch)
        found[device] = torch.stack([logprobs, entropy]).cpu()
    torch.testing.assert_close(found["cuda"], found["cpu"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_step_is_that_of_the_cpu_whatever_the_split(policies, architecture, make_examples):
    examples = make_examples(np.random.default_rng(1), 8)
    whole = SingleBackend(policies[architecture], device="cpu")
    wanted = steps(whole, examples, 1)
    for microbatch_tokens in (24, 1000):
        split = SingleBackend(policies[architecture], device="cuda")
        found = steps(split, examples, 1, microbatch_tokens)
        assert found.loss == pytest.approx(wanted.loss, abs=1e-5)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)


OBJECTIVES = {
    "gspo": (Gspo(), Objective(kl=Kl(0.1), entropy_bonus=0.01)),
    "cispo-mis": (Cispo(), Objective(correction=Mis(0.5, 2.0))),
    "reinforce-tis": (Reinforce(), Objective(form="decoupled", correction=Tis())),
    "reinforce-divergence": (
        Reinforce(),
        Objective(form="decoupled", correction=Gated("seq", "mask", "binary_kl", None, 0.1)),
    ),
}


@pytest.mark.parametrize(("loss", "objective"), OBJECTIVES.values(), ids=OBJECTIVES)
def test_a_step_of_any_objective_is_that_of_the_cpu_and_the_same_bits_again(
    policy, make_group, loss, objective
):
    groups = [make_group(np.random.default_rng(4), [1.0, 0.0, 0.5, 1.0])]

    def taken(device):
        backend = SingleBackend(policy, device=device)
        result = train_step(
            backend,
            groups,
            advantage=Rloo(),
            loss=loss,
            settings=StepSettings(64, 1.0, objective),
            learning_rate=1e-3,
        )
        return result, parameters(backend)

    (wanted, _), (found, first), (_, second) = (taken(d) for d in ("cpu", "cuda", "cuda"))
    assert found.loss == pytest.approx(wanted.loss, abs=1e-5)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_restored_run_goes_on_bitwise(policy, make_examples, tmp_path):
    examples = make_examples(np.random.default_rng(2), 6)
    whole = SingleBackend(policy, device="cuda")
    steps(whole, examples, 3)
    whole.save_policy(tmp_path)
    whole.save_optimizer(tmp_path)
    steps(whole, examples, 2)
    resumed = SingleBackend(tmp_path, device="cuda")
    resumed.restore_optimizer(tmp_path)
    steps(resumed, examples, 2)
    torch.testing.assert_close(parameters(resumed), parameters(whole), rtol=0, atol=0)
