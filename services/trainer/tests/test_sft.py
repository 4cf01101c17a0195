import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from treadle_trainer import sft
from treadle_trainer.core.demonstrations import Demonstration

pytestmark = pytest.mark.component

PLUGIN = """
from treadle_trainer.core.demonstrations import Demonstration

class Counting:
    def read(self, index):
        digit = index % 9
        return Demonstration(((f"{digit}=", False), (f"{digit + 1}", True), ("<end>", True)))
"""


@pytest.fixture
def recipe(small, tmp_path):
    (tmp_path / "counting.py").write_text(PLUGIN)
    content = {
        "model": {"config": str(small / "config.json"), "tokenizer": str(small)},
        "demonstrations": {"name": f"{tmp_path / 'counting.py'}:Counting"},
        "steps": 24,
        "batch_size": 9,
        "optimizer": {"learning_rate": 0.04, "warmup_steps": 5},
        "decay_at": 0.75,
        "decay_factor": 0.3,
        "output": str(tmp_path / "out" / "policy"),
    }
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_policy_learns_what_it_is_shown(recipe, tmp_path, capsys):
    assert sft.main([str(recipe)]) == 0
    lines = capsys.readouterr().out.splitlines()
    measures = {row["measure"]: row["value"] for row in map(json.loads, lines[-3:])}
    assert measures["sft_loss"] < 0.05
    folder = tmp_path / "out" / "policy"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 1
    prompt = torch.tensor([tokenizer.encode("6=")])
    assert tokenizer.decode(model(prompt).logits[0, -1].argmax()) == "7"
    assert [path.name for path in folder.parent.iterdir()] == ["policy"]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(recipe, tmp_path):
    def weights(seed):
        assert sft.main([str(recipe), "steps=2", f"seed={seed}"]) == 0
        return (tmp_path / "out" / "policy" / "model.safetensors").read_bytes()

    assert weights(0) == weights(0) != weights(1)


def test_training_goes_on_from_a_folder(recipe, small, tmp_path):
    override = f"model={{folder: {small}}}"
    content = yaml.safe_load(recipe.read_text())
    del content["model"]
    recipe.write_text(yaml.safe_dump(content))
    assert sft.main([str(recipe), override, "steps=1"]) == 0
    assert (tmp_path / "out" / "policy" / "model.safetensors").is_file()


def test_only_the_tokens_to_be_said_are_trained(policy):
    tokenizer = sft.load_tokenizer(policy)
    example = sft.tokenize(
        tokenizer, Demonstration((("1+", False), ("23", True), ("=", False), ("<end>", True)))
    )
    assert example.token_ids.tolist() == tokenizer.encode("1+23=<end>")
    assert example.trained.tolist() == [False, False, True, True, False, True]


@pytest.mark.parametrize(
    ("pieces", "field"),
    [
        pytest.param((("", True),), "pieces", id="empty"),
        pytest.param((("1", True),), "trained[0]", id="nothing-to-go-on"),
    ],
)
def test_a_demonstration_that_teaches_nothing_ends_the_command(
    recipe, tmp_path, capsys, pieces, field
):
    plugin = tmp_path / "counting.py"
    lines = plugin.read_text().splitlines()
    body = f"        return Demonstration({pieces!r})"
    plugin.write_text("\n".join([*lines[:5], body]))
    assert sft.main([str(recipe)]) == 1
    assert field in capsys.readouterr().err
    assert not (tmp_path / "out" / "policy").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("learning_rte=1", "unknown key", id="unknown"),
        pytest.param("optimizer={learning_rate: -1}", "learning_rate", id="negative"),
        pytest.param("model={folder: x}", "either folder, or config", id="both"),
    ],
)
def test_a_wrong_recipe_is_refused(recipe, capsys, override, message):
    with pytest.raises(SystemExit) as raised:
        sft.main([str(recipe), override])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err
