from pathlib import Path

import pytest

from treadle_runtime import config, plugins
from treadle_runtime.config import BAD_CONFIGURATION, Config, ServiceConfig


class Optimizer(Config):
    learning_rate: float = 1e-6


class Trainer(ServiceConfig):
    """Test schema."""

    steps: int
    optimizer: Optimizer = Optimizer()
    stages: list[Optimizer] = []
    loss: plugins.PluginConfig = plugins.PluginConfig(name="ppo_clip")


RUN = "run: {id: r, dir: runs/r, model: m}\nlisten: unix:/tmp/s\n"


def loaded(tmp_path: Path, text: str, *overrides: str) -> Trainer:
    path = tmp_path / "trainer.yaml"
    path.write_text(text)
    return config.load(Trainer, ["--config", str(path), *overrides])


def test_later_files_and_overrides_win(tmp_path: Path) -> None:
    later = tmp_path / "later.yaml"
    later.write_text("steps: 2\nloss: {name: ppo_clip, clip_low: 0.1}")

    cfg = loaded(
        tmp_path, RUN + "steps: 1", "--config", str(later), "loss.clip_high=0.5", "run.seed=7"
    )

    assert (cfg.steps, cfg.run.seed) == (2, 7)
    assert cfg.loss.parameters == {"clip_low": 0.1, "clip_high": 0.5}


def test_every_problem_is_told_at_once_with_the_nearest_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = RUN + "stepz: 1\noptimizer: {learning_rat: 1}\nstages: [{learning_rate: high}]"

    with pytest.raises(SystemExit) as exited:
        loaded(tmp_path, text)

    assert exited.value.code == BAD_CONFIGURATION
    told = capsys.readouterr().err
    assert "unknown key stepz; did you mean steps" in told
    assert "unknown key optimizer.learning_rat; did you mean optimizer.learning_rate" in told
    assert "stages.0.learning_rate" in told
    assert "'high'" in told
    assert "steps: required" in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param("a: [", "not YAML", id="broken-yaml"),
        pytest.param("- 1", "expected a mapping, got list", id="no-mapping"),
    ],
)
def test_a_file_that_is_no_mapping_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    with pytest.raises(SystemExit):
        loaded(tmp_path, text)

    err = capsys.readouterr().err
    assert told in err
    assert "trainer.yaml" in err


def test_an_override_without_a_value_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        loaded(tmp_path, RUN + "steps: 1", "steps")

    assert "expected dotted.key=value" in capsys.readouterr().err


def test_another_plugin_replaces_the_one_before_with_its_parameters(tmp_path: Path) -> None:
    text = RUN + "steps: 1\nloss: {name: ppo_clip, clip_low: 0.1}"

    assert loaded(tmp_path, text, "loss={name: reinforce, beta: 1}").loss.parameters == {"beta": 1}
    assert loaded(tmp_path, text, "loss={name: ppo_clip, clip_high: 1}").loss.parameters == {
        "clip_low": 0.1,
        "clip_high": 1,
    }


@pytest.mark.parametrize(
    ("run", "refused"),
    [pytest.param("", True, id="closed"), pytest.param("run.insecure_dev=true", False, id="dev")],
)
def test_nothing_listens_beyond_loopback_unless_it_is_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: str, *, refused: bool
) -> None:
    words = ["listen=0.0.0.0:7001", *([run] if run else [])]

    if refused:
        with pytest.raises(SystemExit):
            loaded(tmp_path, RUN + "steps: 1", *words)
        assert "listen: expected unix:/path or a loopback host:port" in capsys.readouterr().err
    else:
        assert loaded(tmp_path, RUN + "steps: 1", *words).listen == "0.0.0.0:7001"
