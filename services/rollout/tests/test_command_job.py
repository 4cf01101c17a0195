"""Form `job` of the agent `command`: Jobs of a cluster, by the official client."""

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from treadle_agents.chat_agent import ChatContext
from treadle_agents.failures import EpisodeError
from treadle_core.episodes import FailureClass
from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Sampling
from treadle_rollout.adapters.commanded import Command
from treadle_rollout.adapters.job_template import Filling, checked, filled
from treadle_rollout.adapters.kubernetes_job import ClusterTerms
from treadle_rollout.adapters.memory_cluster import MemoryCluster
from treadle_rollout.adapters.owners import OWNER

TOKEN = "a token of the cluster"  # noqa: S105, ours
pytestmark = pytest.mark.processes

MINE = {"name": "MINE", "value": "yes"}
TEMPLATE: dict[str, Any] = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"labels": {"team": "ours"}},
    "spec": {
        "template": {
            "spec": {
                "nodeSelector": {"pool": "agents"},
                "containers": [{"name": "agent", "image": "agent:1", "env": [MINE]}],
            }
        }
    },
}


def context(deadline_s: float = 60.0, **task: Any) -> ChatContext:
    return ChatContext(
        task=task,
        base_url="http://gateway:1/s/abc/v1",
        anthropic_url="http://gateway:1/s/abc",
        api_key="key",
        model="policy",
        sampling=Sampling(),
        max_context=128,
        deadline_s=deadline_s,
    )


class Place:
    """A cluster that is served, and the files that lead to it."""

    def __init__(self, cluster: MemoryCluster, folder: Path, url: str) -> None:
        self.cluster = cluster
        self.template = folder / "job.yaml"
        self.template.write_text(yaml.safe_dump(TEMPLATE))
        self.terms = ClusterTerms(kubeconfig=folder / "kubeconfig")
        told = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
        }
        (folder / "kubeconfig").write_text(yaml.safe_dump(told))

    async def agent(self, code: str, **parameters: Any) -> Command:
        """As a worker makes it: in a thread."""
        told = {"job": self.template, "cluster": self.terms, "reward": "file"} | parameters
        return await asyncio.to_thread(Command, [code], **told)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncGenerator[Place]:
    pytest.importorskip("kubernetes_asyncio")
    cluster = MemoryCluster({"agent:1": [sys.executable, "-c"]}, TOKEN)
    async with served(cluster) as url:
        yield Place(cluster, tmp_path, url)


@contextlib.asynccontextmanager
async def served(cluster: MemoryCluster) -> AsyncGenerator[str]:
    runner = web.AppRunner(cluster.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


REPORTS = """
import json, os
task = json.load(open(os.environ["TREADLE_TASK"]))
good = os.environ["OPENAI_API_KEY"] == "key" and os.environ["MINE"] == "yes"
said = {"reward": float(good), "metrics": {"n": task["n"]}}
json.dump(said, open(os.environ["TREADLE_REWARD"], "w"))
"""


async def test_a_job_finds_the_policy_and_its_task_and_says_its_worth(place) -> None:
    agent = await place.agent(REPORTS)

    result = await agent.run(context(n=7))

    assert (result.reward, result.metrics["n"], result.metrics["status"]) == (1, 7, 0)
    assert not place.cluster.jobs
    assert not place.cluster.secrets


async def test_a_job_is_graded_by_what_it_prints(place) -> None:
    agent = await place.agent("print(6 * 7)", reward=None, grader="number")

    assert (await agent.run(context(answer=42))).reward == 1


async def test_exit_status_of_a_job_is_a_reward(place) -> None:
    agent = await place.agent("raise SystemExit(3)", reward="status")

    result = await agent.run(context())

    assert (result.reward, result.metrics["status"]) == (0, 3)


async def test_a_job_that_does_not_end_fails_the_episode_and_is_deleted(place) -> None:
    agent = await place.agent("import time; time.sleep(99)")

    with pytest.raises(EpisodeError, match="deadline"):
        await agent.run(context(deadline_s=2.0))
    assert not place.cluster.jobs


async def test_a_cancelled_job_is_deleted(place) -> None:
    agent = await place.agent("import time; time.sleep(99)")
    running = asyncio.create_task(agent.run(context()))
    await place.cluster.until(lambda: bool(place.cluster.secrets))

    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running
    assert not place.cluster.jobs
    assert not place.cluster.secrets


async def test_an_image_that_cannot_be_had_fails_the_episode_at_once(place) -> None:
    agent = await place.agent("pass", image="agent:2")

    with pytest.raises(EpisodeError, match="ImagePullBackOff") as found:
        await agent.run(context())
    assert found.value.failure_class is FailureClass.INFRASTRUCTURE


async def test_a_job_that_the_cluster_refuses_is_the_recipes_fault(place) -> None:
    wrong = json.loads(json.dumps(TEMPLATE))
    wrong["metadata"]["labels"]["team"] = "not a label"
    place.template.write_text(yaml.safe_dump(wrong))
    agent = await place.agent("pass")

    with pytest.raises(EpisodeError, match=r"metadata\.labels") as found:
        await agent.run(context())
    assert found.value.failure_class is FailureClass.ENVIRONMENT


async def test_jobs_of_a_worker_that_is_gone_are_swept_and_no_others(place) -> None:
    alive = await place.agent("import time; time.sleep(99)")
    running = asyncio.create_task(alive.run(context()))
    await place.cluster.until(lambda: bool(place.cluster.secrets))
    (mine,) = place.cluster.jobs
    left = json.loads(json.dumps(place.cluster.jobs[mine]))
    left["metadata"]["name"] = "treadle-left"
    here, pid, _ = left["metadata"]["labels"][OWNER].split(".")
    left["metadata"]["labels"][OWNER] = f"{here}.{pid}.1"
    place.cluster.add(left)

    await place.agent("pass", cluster=place.terms.model_copy(update={"context": "c"}))

    assert list(place.cluster.jobs) == [mine]
    running.cancel()
    await asyncio.wait({running})


async def test_a_missing_cluster_is_an_error_of_the_recipe(place, tmp_path) -> None:
    told = (tmp_path / "kubeconfig").read_text()
    (tmp_path / "silent").write_text(re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:1", told))
    (tmp_path / "stranger").write_text(told.replace(TOKEN, "another"))

    for name in ("none", "silent", "stranger"):
        with pytest.raises(InvalidFieldError, match=r"agent\.cluster"):
            await place.agent("pass", cluster=ClusterTerms(kubeconfig=tmp_path / name))


async def test_files_of_a_task_are_refused(place) -> None:
    agent = await place.agent("pass")

    with pytest.raises(TypeError, match=r"task\.files"):
        await agent.run(context(files={"a": "x"}))


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ([], "mapping"),
        ({"apiVersion": "v1", "kind": "Pod"}, "batch/v1 Job"),
        ({"apiVersion": "batch/v1", "kind": "Job", "spec": {}}, "containers"),
    ],
    ids=["a-list", "a-pod", "no-container"],
)
def test_what_is_no_job_is_refused(template, told) -> None:
    with pytest.raises(InvalidFieldError, match=told):
        checked(template, "agent.job")


def test_a_template_keeps_what_it_says_and_bounds_what_it_does_not() -> None:
    filling = Filling("n", {"treadle.run": "r"}, "other:2", ["a"], ["KEY"], 12.3)

    job = filled(checked(TEMPLATE, "agent.job"), filling)

    pod = job["spec"]["template"]
    (agent,) = pod["spec"]["containers"]
    assert job["metadata"]["labels"] == {"team": "ours", "treadle.run": "r"}
    assert pod["metadata"]["labels"] == {"treadle.run": "r"}
    assert pod["spec"]["nodeSelector"] == {"pool": "agents"}
    assert (agent["image"], agent["args"]) == ("other:2", ["a"])
    assert [each["name"] for each in agent["env"]] == ["MINE", "KEY"]
    assert (job["spec"]["activeDeadlineSeconds"], job["spec"]["backoffLimit"]) == (13, 0)
    assert "env" in TEMPLATE["spec"]["template"]["spec"]["containers"][0]
    assert len(TEMPLATE["spec"]["template"]["spec"]["containers"][0]["env"]) == 1
