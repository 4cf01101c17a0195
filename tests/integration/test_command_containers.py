"""Form `image` of the agent `command`: a program in a container, and the gateway in front of it."""

import asyncio
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from container_members import until as holds

from treadle_agents.chat_agent import ChatContext
from treadle_agents.failures import EpisodeError
from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Sampling
from treadle_gateway.settings import GatewaySettings
from treadle_gateway.testing import MODEL, Scripted, serving, write_model
from treadle_rollout.adapters.commanded import Command
from treadle_rollout.adapters.container import ContainerTerms, sweep
from treadle_rollout.adapters.owners import RUN, SESSION

pytestmark = [pytest.mark.containers, pytest.mark.processes]

IMAGE = "python:3.11-slim"
PYTHON = ("python3", "-c")
NETWORK, SUBNET, HOST = "treadle-agents-test", "172.30.77.0/24", "172.30.77.1"
ENGINE = ("docker",)
SLEEPS = [*PYTHON, "import time; print('here', flush=True); time.sleep(600)"]


GRADED = {"reward": None, "grader": f"{__file__}:says"}


def says(answer, task):
    return float(task["label"] in answer)


@pytest.fixture
def network(images):
    docker("network", "rm", NETWORK, status=None)
    docker("network", "create", "--internal", "--subnet", SUBNET, NETWORK)
    yield ContainerTerms(engine=ENGINE, network=NETWORK, memory_mb=64, pids=32)
    for name in ours():
        docker("rm", "--force", name)
    docker("network", "rm", NETWORK)


def docker(*words, status=0):
    done = subprocess.run([*ENGINE, *words], capture_output=True, text=True, check=False)
    assert status in (None, done.returncode), done.stderr
    return done.stdout.strip()


def ours():
    """Containers that bear a session's label."""
    return docker("ps", "--all", "--quiet", "--filter", f"label={SESSION}").split()


async def agent(terms, *command, **told):
    """As a worker makes it: in a thread."""
    parameters = {"reward": "status", "image": IMAGE, "container": terms} | told
    return await asyncio.to_thread(Command, [*command], **parameters)


def context(deadline_s=120.0, base_url="http://127.0.0.1:1/s/abc/v1", key="key", **task):
    return ChatContext(
        task=task,
        base_url=base_url,
        anthropic_url=base_url.removesuffix("/v1"),
        api_key=key,
        model=MODEL,
        sampling=Sampling(),
        max_context=4096,
        deadline_s=deadline_s,
    )


@asynccontextmanager
async def gateway(folder):
    policy = Scripted(write_model(folder / "model"))
    log = folder / "gateway.log"
    settings = GatewaySettings(
        folder / "model", MODEL, 4096, log, host=HOST, insecure_dev=True, port=0
    )
    async with serving(settings, policy) as world:
        yield world


ASKS = """
import json, os, socket, urllib.request
task = json.load(open(os.environ["TREADLE_TASK"]))
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": task["q"]}]}
key = os.environ["OPENAI_API_KEY"]
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"content-type": "application/json", "authorization": "Bearer " + key})
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
good = said == "Hello." and open("a/b.txt").read() == "text" and os.getuid() != 0
open("mine.txt", "w").write("x")
json.dump({"reward": float(good), "metrics": {"n": 7}}, open(os.environ["TREADLE_REWARD"], "w"))
"""


async def test_a_program_in_a_container_plays_an_episode_that_trains(network, tmp_path):
    player = await agent(network, *PYTHON, ASKS, reward="file")
    async with gateway(tmp_path) as world:
        access = await world.open()
        url = access.urls["openai"]

        result = await player.run(
            context(base_url=url, key=access.token, q="hi", files={"a/b.txt": "text"})
        )

        captured = await world.pool.end(access.session)
    assert (result.reward, result.metrics["n"]) == (1, 7)
    assert sum(segment.num_trained for segment in captured.segments) == len("Hello.") + 1
    assert not ours()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import urllib.request as u; u.urlopen('http://192.0.2.1', timeout=5)", "URLError"),
        ("open('/usr/x', 'w')", "Read-only file system"),
        ("open('/proc/sys/kernel/hostname', 'w').write('x')", "Error"),
        ("import os; os.setuid(0)", "not permitted"),
        (
            "import subprocess; [subprocess.Popen(['sleep', '9']) for _ in range(64)]",
            "temporarily unavailable",
        ),
    ],
    ids=["the-world", "its-root", "the-kernel", "root", "many-processes"],
)
async def test_a_container_does_not_reach(network, code, why):
    said = f"try:\n    {code}\nexcept OSError as error:\n    print(repr(error))"
    player = await agent(network, *PYTHON, said, **GRADED)

    assert (await player.run(context(label=why))).reward == 1


async def test_too_much_memory_fails_the_episode(network):
    player = await agent(network, *PYTHON, "x = bytearray(200 << 20)")

    with pytest.raises(EpisodeError, match="more than 64 MiB"):
        await player.run(context())
    assert not ours()


async def test_a_grader_reads_a_file_of_the_container_and_no_link(network):
    code = "import os; os.symlink('/etc', 'out'); open('in.txt', 'w').write('root')"
    for answer, reward in (("in.txt", 1), ("out/passwd", 0)):
        player = await agent(network, *PYTHON, code, answer=answer, **GRADED)
        assert (await player.run(context(label="root"))).reward == reward


async def test_a_container_that_does_not_end_is_removed_at_its_deadline(network):
    player = await agent(network, *SLEEPS)

    with pytest.raises(EpisodeError, match="deadline"):
        await player.run(context(deadline_s=4.0))
    assert not ours()


async def test_a_cancelled_container_is_removed(network):
    player = await agent(network, *SLEEPS)
    running = asyncio.create_task(player.run(context()))
    await asyncio.to_thread(holds, "a container", ours)

    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running
    assert not ours()


WORKER = """
import asyncio
from test_command_containers import NETWORK, SLEEPS, ContainerTerms, agent, context
async def main():
    await (await agent(ContainerTerms(network=NETWORK), *SLEEPS)).run(context())
asyncio.run(main())
"""


def of_run_1():
    return docker("ps", "--quiet", "--filter", f"label={RUN}=run-1")


def leave_one_behind():
    """A worker that is killed while its container runs."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    seen = {**os.environ, "TREADLE_RUN": "run-1", "PYTHONPATH": path}
    worker = subprocess.Popen([sys.executable, "-c", WORKER], env=seen)
    try:
        holds("a container of the worker", of_run_1)
    finally:
        worker.kill()
        worker.wait()


async def test_what_a_killed_worker_left_is_swept_and_nothing_else(network):
    mine = await agent(network, *SLEEPS)
    running = asyncio.create_task(mine.run(context()))
    await asyncio.to_thread(holds, "a container", ours)
    (alive,) = ours()
    await asyncio.to_thread(leave_one_behind)
    assert of_run_1()

    swept = await asyncio.to_thread(sweep, ENGINE)

    assert (swept, ours()) == (1, [alive])
    running.cancel()
    await asyncio.wait({running})


async def test_what_is_not_there_is_an_error_of_the_recipe(network):
    for changed, told in (
        ({"engine": "no-such-engine"}, "engine"),
        ({"network": "no-such-network"}, "network"),
        ({"network": "bridge"}, "network"),
    ):
        with pytest.raises(InvalidFieldError, match=rf"agent\.container\.{told}"):
            await agent(network.model_copy(update=changed), "true")
    with pytest.raises(InvalidFieldError, match=r"agent\.image"):
        await agent(network, "true", image="treadle.invalid/none:1")
