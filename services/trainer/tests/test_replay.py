"""Training on what was recorded, alone: the same numbers as the run."""

import json
from dataclasses import replace

import pytest
import yaml
from google.protobuf import json_format

from treadle_core.errors import InvalidFieldError, TreadleError
from treadle_trainer import replay, wire
from treadle_trainer.core.claims import Claim
from treadle_trainer.core.schedule import Schedule

pytestmark = pytest.mark.component


@pytest.fixture
def export(make_run, tmp_path):
    """A run that has ended, and what `treadle export` makes of such a one."""

    def make(run):
        folder = tmp_path / "export"
        (folder / "steps").mkdir(parents=True)
        (folder / "payloads").symlink_to(run.payloads._store.path("0" * 64).parent.parent)
        for step, metrics, _ in run.experience.reports:
            tasks = wire.claim_to_wire(Claim(run.experience.batches[step - 1])).tasks
            for task in tasks:
                for episode in task.episodes:
                    run.payloads._store.put(episode.result.payload.inline or b"")
                    episode.result.payload.ClearField("inline")
            rows = [json_format.MessageToDict(t, preserving_proto_field_name=True) for t in tasks]
            head = {"step": step, "last": False, "metrics": dict(metrics)}
            text = "".join(f"{json.dumps(row)}\n" for row in (head, *rows))
            (folder / "steps" / f"{step:06d}.jsonl").write_text(text)
        steps = [step for step, _, _ in run.experience.reports]
        (folder / "export.json").write_text(json.dumps({"format": 1, "steps": steps}))
        return folder

    return make


async def test_a_replay_computes_what_the_run_computed_bit_by_bit(make_run, export):
    run = make_run(3)
    trainer = run.trainer()
    await run.finish(trainer)

    backend, unequal, taken = replay.replay(trainer._recipe, export(run))

    assert (unequal, taken) == (0, 3)
    for name, tensor in trainer._loaded.parameters().items():
        assert tensor.equal(backend.parameters()[name])


async def test_a_replay_with_another_recipe_says_where_it_differs(make_run, export, capsys):
    run = make_run(3)
    await run.finish(run.trainer())
    recipe = replace(run.trainer()._recipe, schedule=Schedule(5e-3))
    _, unequal, taken = replay.replay(recipe, export(run))
    assert (unequal, taken) == (2, 3)  # the first step starts from the same parameters
    assert "step 2 loss" in capsys.readouterr().err


async def test_a_replay_without_a_payload_names_the_episode(make_run, export):
    run = make_run(1)
    await run.finish(run.trainer())
    folder = export(run)
    (folder / "payloads").unlink()
    with pytest.raises(TreadleError, match="cannot be trained on: 1-0-0/1"):
        replay.replay(run.trainer()._recipe, folder)


@pytest.mark.parametrize(
    ("head", "said"),
    [
        pytest.param(None, "export.json: expected an export", id="nothing"),
        pytest.param("{", "export.json: expected an export", id="torn"),
        pytest.param('{"format": 9}', "expected format 1, got 9", id="another-format"),
        pytest.param('{"format": 1, "steps": [1]}', "expected a step as", id="no-step"),
    ],
)
def test_what_is_no_export_is_refused(tmp_path, head, said):
    if head is not None:
        (tmp_path / "export.json").write_text(head)
    with pytest.raises(InvalidFieldError, match=said):
        list(replay.read_steps(tmp_path))


def test_the_command_reads_the_trainer_s_part_of_a_recipe(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    run = {"dir": "runs/x", "model": str(tmp_path), "hung_s": 9.0}
    sections = {"run": run, "trainer": {"optimizer": {"learning_rate": 1.0}}, "experience": {}}
    recipe.write_text(yaml.safe_dump(sections))
    config = replay.config_of(recipe, ["trainer.microbatch_tokens=64"])
    assert (config.run.id, config.microbatch_tokens) == ("replay", 64)
    words = [str(recipe), "trainer.rank=1", "--from", str(tmp_path)]
    assert replay.main(words) == 2
    assert "unknown key trainer.rank; did you mean trainer.ranks" in capsys.readouterr().err
