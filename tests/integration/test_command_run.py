"""A run whose agents are containers, and whose worker is killed among them."""

import json
import os
import signal
from pathlib import Path

import pytest
from container_members import until as holds
from e2e_harness import Run
from test_command_containers import HOST, IMAGE, NETWORK, PYTHON, docker, network, ours

from treadle_rollout.adapters.owners import OWNER

__all__ = ["network"]
pytestmark = [pytest.mark.containers, pytest.mark.e2e]

ASKS = """
import json, os, sys, time, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}
key = os.environ["OPENAI_API_KEY"]
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"content-type": "application/json", "authorization": "Bearer " + key})
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
time.sleep(1)  # its work
json.dump(float("<call>" in said), open(os.environ["TREADLE_REWARD"], "w"))
"""


def engine() -> list[str]:
    """As a worker calls it, which does not see where ours is."""
    address = os.environ.get("DOCKER_HOST")
    return ["docker", "--host", address] if address else ["docker"]


def test_a_run_goes_on_when_the_worker_of_its_containers_is_killed(network, tmp_path: Path) -> None:
    agent = {
        "name": "command",
        "image": IMAGE,
        "command": [*PYTHON, ASKS, "$expression"],
        "reward": "file",
        "container": {"engine": engine(), "network": NETWORK},
    }
    run = Run(
        tmp_path / "run",
        f"rollout.agent={json.dumps(agent)}",
        f"rollout.gateway={{host: {HOST}}}",
        "run.insecure_dev=true",
        "experience.steps=2",
        "experience.tasks_per_step=1",
        "experience.group_size=4",
        "experience.evaluation=null",
        "experience.lease_s=5",
        "experience.retries=5",
        "rollout.slots=2",
    )
    run.start()
    try:
        run.wait_until(lambda: bool(ours()))
        name = ours()[0]
        owner = docker("inspect", "--format", f'{{{{index .Config.Labels "{OWNER}"}}}}', name)
        os.kill(int(owner.split(".")[1]), signal.SIGKILL)
        holds("the container is gone", lambda: name not in ours())
        run.finish()
    finally:
        run.kill_all()

    found = run.fsck()
    assert (found["trained_step"], found["consumed"], found["lost"]) == (2, 8, 0)
    assert run.rows("rollout", "rollout")[-1]["worker_restarts"] >= 1
    assert not ours()
