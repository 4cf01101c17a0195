import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import yaml

from treadle_core.errors import InvalidFieldError
from treadle_runtime.config import load
from treadle_runtime.plugins import PluginConfig, build
from treadle_trainer.config import TrainerConfig
from treadle_trainer.core.advantages.batch_mean import BatchMean
from treadle_trainer.core.advantages.grpo import Grpo
from treadle_trainer.core.aggregations.constant_length import ConstantLength
from treadle_trainer.core.corrections.gated import Gated
from treadle_trainer.core.kl import Kl
from treadle_trainer.core.losses.ppo_clip import PpoClip
from treadle_trainer.core.losses.reinforce import Reinforce
from treadle_trainer.core.objective import Objective
from treadle_trainer.core.schedule import Schedule
from treadle_trainer.launch import Place, place_of
from treadle_trainer.main import recipe_of

RECIPE = {
    "run": {"id": "run", "dir": "runs/x", "model": "policy"},
    "listen": "unix:/tmp/trainer",
    "experience_address": "unix:/tmp/experience",
    "refit_address": "unix:/tmp/refit",
    "optimizer": {
        "learning_rate": 4.0e-4,
        "betas": [0.9, 0.95],
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
    },
    "advantage": {"name": "grpo"},
    "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
    "microbatch_tokens": 1024,
    "checkpoint_every": 10,
}


def test_the_recipe_of_the_demo_builds(tmp_path):
    path = tmp_path / "trainer.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    recipe = recipe_of(load(TrainerConfig, ["--config", str(path)]))
    assert recipe.advantage == Grpo()
    assert recipe.loss == PpoClip(0.2, 0.28)
    assert recipe.schedule == Schedule(4e-4)
    assert recipe.settings.microbatch_tokens == 1024
    assert recipe.settings.objective == Objective()


def test_a_recipe_names_estimator_loss_aggregation_correction_kl_and_bonus(tmp_path):
    recipe = RECIPE | {
        "advantage": {"name": "batch_mean"},
        "loss": {"name": "reinforce"},
        "aggregation": {"name": "constant_length", "length": 512},
        "form": "decoupled",
        "correction": {"name": "gated", "level": "seq", "gate": "binary_kl", "high": 0.005},
        "kl": {"coefficient": 0.01},
        "entropy_bonus": 0.001,
    }
    path = tmp_path / "trainer.yaml"
    path.write_text(yaml.safe_dump(recipe))
    built = recipe_of(load(TrainerConfig, ["--config", str(path)]))
    assert built.advantage == BatchMean()
    assert built.loss == Reinforce()
    assert built.settings.objective == Objective(
        ConstantLength(512),
        "decoupled",
        Gated("seq", "mask", "binary_kl", None, 0.005),
        Kl(0.01, "k3", "rollout"),
        0.001,
    )


def test_every_plugin_of_the_trainer_can_be_built():
    needed = {"constant_length": {"length": 8}}
    for group in ("advantages", "losses", "aggregations", "corrections"):
        points = entry_points(group=f"treadle.{group}")
        assert points
        for point in points:
            config = PluginConfig(name=point.name, **needed.get(point.name, {}))
            assert build(f"treadle.{group}", config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("checkpont_every=1", "did you mean checkpoint_every", id="typo"),
        pytest.param("optimizer.learning_rate=0", "optimizer.learning_rate", id="rate"),
        pytest.param("loss.clip_hgh=1", "did you mean clip_high", id="plugin-parameter"),
        pytest.param("advantage.name=gppo", "did you mean grpo", id="plugin"),
        pytest.param("optimizer.learning_rate=.inf", "finite", id="infinite-rate"),
        pytest.param("publish_every=0", "publish_every", id="never-published"),
        pytest.param("no_progress_s=0", "no_progress_s", id="an-alarm-always"),
        pytest.param("microbatch_tokens=0", "microbatch_tokens", id="no-tokens"),
        pytest.param("ranks=0", "ranks", id="no-rank"),
        pytest.param("shaping.stop_properly=2", "shaping.stop_properly", id="truncation-pays"),
        pytest.param("shaping.clip=[1, 0]", "clip: expected the least reward first", id="clip"),
        pytest.param(
            "shaping.overlong={max_tokens: 4, buffer: 8}",
            "buffer: expected at most max_tokens 4, got 8",
            id="long-ramp",
        ),
        pytest.param(
            "shaping={stop_properly: 0, overlong: {max_tokens: 4, buffer: 2}}",
            "stop_properly: expected none beside overlong",
            id="two-ways-to-shape",
        ),
        pytest.param("rank_timeout_s=0", "rank_timeout_s", id="no-time"),
        pytest.param("prefetch_bytes=-1", "prefetch_bytes", id="less-than-nothing"),
        pytest.param("optimizer.betas=[1.0, 0.9]", "optimizer.betas", id="betas"),
        pytest.param("advantage.name=gae", "wants the values of a critic", id="critic"),
        pytest.param("advantage.name=on_policy_distill", "of a teacher", id="teacher"),
        pytest.param("aggregation.name=token_meen", "did you mean token_mean", id="aggregation"),
        pytest.param("correction.name=tiss", "did you mean tis", id="correction"),
        pytest.param("correction.name=tis", "the ratio of form direct weighs", id="twice"),
        pytest.param(
            "correction={name: gated, mode: clip}", "form direct weighs", id="twice-by-mode"
        ),
        pytest.param("form=decoupled", "correction: expected a plugin", id="uncorrected"),
        pytest.param("loss={name: reinforce}", "it has no ratio", id="reinforce-off-policy"),
        pytest.param("kl={coefficient: 0.1, reference: model}", "reference model", id="reference"),
        pytest.param("kl={coefficient: 0.1, use: reward}", "expected loss", id="kl-in-reward"),
        pytest.param("kl={coefficient: 0.1, target: 6}", "adaptive", id="adaptive"),
        pytest.param("kl={coefficient: 0.1, estimator: k1}", "pushes the policy away", id="k1"),
        pytest.param("kl={coefficient: 0}", "kl.coefficient", id="no-kl"),
        pytest.param("entropy_bonus=-1", "entropy_bonus", id="bonus"),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path, capsys, override, message):
    path = tmp_path / "trainer.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    with pytest.raises(SystemExit):
        load(TrainerConfig, ["--config", str(path), override])
    assert message in capsys.readouterr().err


@pytest.mark.processes
def test_the_configuration_imports_nothing_heavy():
    code = (
        "import json, sys, treadle_trainer.config; "
        "print(json.dumps([m for m in ('torch', 'transformers', 'grpc') if m in sys.modules]))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert json.loads(answer.stdout) == []


@pytest.mark.parametrize(
    ("told", "ranks", "place"),
    [
        pytest.param({}, 1, Place(0, 1, told=False), id="alone"),
        pytest.param({}, 4, Place(0, 4, told=False), id="by-the-recipe"),
        pytest.param({"RANK": "1", "WORLD_SIZE": "2"}, 1, Place(1, 2, told=True), id="by-torchrun"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "2"}, 2, Place(0, 2, told=True), id="by-both"),
    ],
)
def test_a_process_knows_its_place_among_the_ranks(told, ranks, place):
    assert place_of(told, ranks) == place


def test_a_recipe_and_torchrun_that_disagree_on_the_ranks_are_refused():
    with pytest.raises(InvalidFieldError, match="ranks: expected 4 as WORLD_SIZE, or 1, got 2"):
        place_of({"RANK": "0", "WORLD_SIZE": "4"}, 2)
