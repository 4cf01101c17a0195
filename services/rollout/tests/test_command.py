"""The agent `command`: any program that finds the policy in its environment."""

import json
import sys
from typing import Any

import pytest

from treadle_agents.chat_agent import ChatContext
from treadle_agents.failures import EpisodeError
from treadle_core.tickets import Sampling
from treadle_rollout.adapters.commanded import Command
from treadle_rollout.adapters.container import ContainerTerms
from treadle_rollout.adapters.kubernetes_job import ClusterTerms

pytestmark = pytest.mark.processes


def context(deadline_s: float = 60.0, **task: Any) -> ChatContext:
    return ChatContext(
        task=task,
        base_url="http://127.0.0.1:1/s/x/v1",
        anthropic_url="http://127.0.0.1:1/s/x",
        api_key="key",
        model="policy",
        sampling=Sampling(),
        max_context=128,
        deadline_s=deadline_s,
    )


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def test_exit_status_is_a_reward() -> None:
    good, bad = (Command(python(f"raise SystemExit({n})"), reward="status") for n in (0, 3))

    assert (await good.run(context())).reward == 1
    result = await bad.run(context())
    assert (result.reward, result.metrics["status"]) == (0, 3)


async def test_a_command_sees_the_policy_its_task_and_nothing_of_ours(monkeypatch) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    code = """
import json, os
task = json.load(open(os.environ["TREADLE_TASK"]))
names = "OPENAI_BASE_URL OPENAI_API_KEY OPENAI_MODEL ANTHROPIC_BASE_URL SECRET MINE"
seen = {name: os.environ.get(name) for name in names.split()}
seen["file"] = open("a/b.txt").read()
good = seen == {"OPENAI_BASE_URL": "http://127.0.0.1:1/s/x/v1", "OPENAI_API_KEY": "key",
    "OPENAI_MODEL": "policy", "ANTHROPIC_BASE_URL": "http://127.0.0.1:1/s/x", "SECRET": None,
    "MINE": "yes", "file": "text"} and task["n"] == 7
said = {"reward": float(good), "metrics": {"n": task["n"]}}
json.dump(said, open(os.environ["TREADLE_REWARD"], "w"))
"""
    agent = Command(python(code), reward="file", environment={"MINE": "yes"})

    result = await agent.run(context(n=7, files={"a/b.txt": "text"}))

    assert (result.reward, result.metrics["n"]) == (1, 7)


@pytest.mark.parametrize(
    ("left", "reward"), [("0.25", 0.25), (None, None)], ids=["a-number", "no-file"]
)
async def test_a_reward_file_may_hold_a_number_or_be_missing(left, reward) -> None:
    code = f"open(__import__('os').environ['TREADLE_REWARD'], 'w').write({left!r})"
    agent = Command(python(code if left else "pass"), reward="file")

    assert (await agent.run(context())).reward == reward


@pytest.mark.parametrize(
    ("answer", "code"),
    [("", "print(n)"), ("out.txt", "open('out.txt', 'w').write(str(n))")],
    ids=["what-it-prints", "a-file"],
)
async def test_a_grader_says_what_the_answer_is_worth(answer, code) -> None:
    words = [*python("import sys; n = 6 * int(sys.argv[1]); " + code), "$factor"]
    agent = Command(words, grader="number", answer=answer)

    result = await agent.run(context(factor=7, answer=42))

    assert result.reward == 1


async def test_a_link_is_no_answer(tmp_path) -> None:
    (tmp_path / "secret").write_text("42")
    code = f"import os; os.symlink({json.dumps(str(tmp_path / 'secret'))}, 'out.txt')"
    agent = Command(python(code), grader="number", answer="out.txt")

    assert (await agent.run(context(answer=42))).reward == 0


async def test_a_command_that_does_not_end_fails_the_episode() -> None:
    agent = Command(python("import time; print('here', flush=True); time.sleep(99)"), "status")

    with pytest.raises(EpisodeError, match=r"deadline.*here"):
        await agent.run(context(deadline_s=2.0))


async def test_a_reward_that_is_no_json_fails_the_episode() -> None:
    code = "open(__import__('os').environ['TREADLE_REWARD'], 'w').write('much')"

    with pytest.raises(EpisodeError, match="TREADLE_REWARD: expected a number"):
        await Command(python(code), reward="file").run(context())


@pytest.mark.parametrize("name", ["/etc/x", "../x", ""], ids=["absolute", "above", "empty"])
async def test_files_of_a_task_stay_in_its_folder(name) -> None:
    with pytest.raises(ValueError, match="within the folder"):
        await Command(["true"], reward="status").run(context(files={name: "x"}))


@pytest.mark.parametrize("told", [{}, {"reward": "status", "grader": "number"}])
def test_a_command_has_one_judge(told) -> None:
    with pytest.raises(ValueError, match="either reward or grader"):
        Command(["true"], **told)


async def test_words_name_fields_of_the_task_and_the_folder_of_the_run(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    agent = Command([*python("import sys; print(sys.argv[1:])"), "$here", "$n"], grader="exact")

    result = await agent.run(context(n=[7], answer=str([str(tmp_path), "[7]"])))

    assert result.reward == 1


async def test_a_grader_may_have_an_event_loop_of_its_own() -> None:
    agent = Command(python("print('def f(): return 2')"), grader="python_tests")

    assert (await agent.run(context(tests="assert f() == 2"))).reward == 1


async def test_a_link_of_a_folder_leads_to_no_answer(tmp_path) -> None:
    (tmp_path / "secret").write_text("42")
    code = f"import os; os.symlink({json.dumps(str(tmp_path))}, 'out')"
    agent = Command(python(code), grader="number", answer="out/secret")

    assert (await agent.run(context(answer=42))).reward == 0


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"command": []}, "a program and its words"),
        ({"command": ["true"], "container": ContainerTerms()}, "expected with image"),
        ({"command": ["true"], "cluster": ClusterTerms()}, "expected with job"),
        ({"job": "job.yaml", "answer": "out.txt"}, "expected none with a job"),
    ],
    ids=["nothing", "a-container-without-image", "a-cluster-without-job", "a-file-of-a-job"],
)
def test_terms_of_a_form_come_with_it(told, why) -> None:
    with pytest.raises(ValueError, match=why):
        Command(reward="status", **told)
