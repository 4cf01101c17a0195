"""Coding by programs that nobody changed for it: one is trained, one is captured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from treadle_agents.chat_agent import ChatContext
from treadle_agents.grading.python_tests import PythonTests
from treadle_core.tickets import Sampling
from treadle_gateway.settings import GatewaySettings
from treadle_gateway.testing import MODEL, Scripted, serving, write_model
from treadle_rollout.adapters.commanded import Command
from treadle_runtime import plugins

ROOT = Path(__file__).parents[2]
CODING = ROOT / "examples" / "coding"
CLIENTS = ROOT / ".clients"
CODEX = "npm/node_modules/@openai/codex-linux-x64/vendor/*/bin/codex"


def loaded(name: str):
    return plugins.load("treadle.none", f"{CODING / name}")


def tasks(seed: int = 0):
    return loaded("tasks.py:CodingTasks")(seed=seed)


def needs(pattern: str) -> None:
    if not any(CLIENTS.glob(pattern)):
        pytest.skip("NO STOCK CLIENT WAS TRIED: `make clients` installs them")


def treadle(*words: str, folder: Path) -> str:
    command = [sys.executable, "-m", "treadle_cli.main", *words]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280
    )
    logs = "".join(path.read_text()[-2000:] for path in folder.glob("logs/*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return done.stdout


def test_the_same_cursor_gives_the_same_task_and_another_seed_another() -> None:
    assert tasks().read(7) == tasks().read(7)
    assert tasks().read(7) != tasks(seed=1).read(7)


def test_tests_of_a_task_tell_right_from_wrong_and_from_nothing() -> None:
    task, grade = tasks().read(3), PythonTests()
    right = f"def value():\n    return {task['expression']}\n"

    assert grade(right, task) == 1
    assert grade(right.replace("return", "return 1 +"), task) == 0
    assert grade(task["files"]["solution.py"], task) == 0


@pytest.mark.processes
async def test_a_command_line_harness_solves_a_task_and_is_captured_token_for_token(
    tmp_path, monkeypatch
) -> None:
    needs(CODEX)
    monkeypatch.chdir(ROOT)
    agent = Command(
        ["$here/examples/coding/codex.sh", "$here", "$prompt"],
        grader="python_tests",
        answer="solution.py",
    )
    policy = Scripted(write_model(tmp_path / "model"))
    policy.says, policy.piece = loaded("script.py:answer"), 64
    settings = GatewaySettings(tmp_path / "model", MODEL, 200_000, tmp_path / "gateway.log")
    async with serving(settings, policy) as world:
        access = await world.open(sampling=Sampling(temperature=1.0, max_tokens=4096))
        context = ChatContext(
            task=tasks().read(0),
            base_url=access.urls["openai"],
            anthropic_url=access.urls["anthropic"],
            api_key=access.token,
            model=MODEL,
            sampling=Sampling(),
            max_context=200_000,
            deadline_s=250.0,
        )

        result = await agent.run(context)

        captured = await world.pool.end(access.session)
    assert (result.reward, result.metrics["status"]) == (1, 0)
    sampled = [token for call in policy.calls for token in call.sampled]
    (segment,) = captured.segments
    assert segment.token_ids[segment.sampled].tolist() == sampled
    assert segment.num_trained == len(sampled)


@pytest.mark.e2e
def test_a_command_line_harness_trains_a_policy(tmp_path: Path) -> None:
    needs(CODEX)
    model = tmp_path / "policy"
    loaded("make_policy.py:write")(model)
    told = ["experience.evaluation=null", "experience.steps=1", "experience.group_size=2"]
    run = tmp_path / "run"
    told += [f"run.dir={run}", f"run.model={model}"]

    treadle("train", "examples/coding/harness.yaml", *told, folder=run)

    assert trained(run) == (1, 2, 0)


@pytest.mark.e2e
def test_a_program_on_a_stock_library_trains_a_policy(tmp_path: Path) -> None:
    needs("python/bin/python")
    run, told = tmp_path / "run", ["experience.tasks_per_step=1", "experience.group_size=4"]

    treadle("train", "examples/coding/recipe.yaml", f"run.dir={run}", *told, folder=run)

    assert trained(run) == (3, 3 * 4, 0)


def trained(run: Path) -> tuple[int, int, int]:
    """Steps, the episodes in them, and lost ones."""
    printed = treadle("fsck", str(run), folder=run).splitlines()
    found = {row["measure"]: row["value"] for row in map(json.loads, printed)}
    return found["trained_step"], found["consumed"], found["lost"]
