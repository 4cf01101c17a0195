"""A run whose four services, Redis and NATS are containers, on networks of their own.

Only the experience service reaches Redis. The run's directory is a folder of this host that all
services mount, and which is read here; weights go through it too.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import container_images
import yaml
from containers_harness import DURABLE, RECOVERY_S, Member, until
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

from treadle_cli.rows import written

ROOT = Path(__file__).parent.parent.parent
PORTS = {"experience": 7001, "rollout": 7002, "trainer": 7003, "refit": 7004}
RUN = "runs/fleet"
USER = 10001
"""Of the images."""
START_S = 3 * RECOVERY_S
OVERRIDES = (
    f"run.dir={RUN}",
    "experience.steps=5000",
    "experience.tasks_per_step=4",
    "experience.group_size=4",
    "experience.evaluation=null",
    "experience.lease_s=3",
    "experience.retries=20",
    "rollout.slots=16",
    "trainer.checkpoint_every=2",
)


class Fleet:
    """The containers by name, and what the run's directory says."""

    def __init__(self, work: Path, engine: Any) -> None:
        """`work` is where the services work: the recipe, its example and the run's directory."""
        self.work = work
        self._engine = engine
        self._networks: dict[str, Network] = {}
        self._reaches: dict[str, tuple[str, ...]] = {
            "redis": ("ledger",),
            "nats": ("control",),
            "experience": ("control", "ledger"),
            **dict.fromkeys(("refit", "rollout", "trainer"), ("control",)),
        }
        self.members = {name: Member(lambda name=name: self._make(name)) for name in self._reaches}

    @contextmanager
    def running(self) -> Generator["Fleet"]:
        """Starts all, and removes all."""
        configure(self.work)
        with ExitStack() as stack:
            for name in ("control", "ledger"):
                self._networks[name] = stack.enter_context(Network())
            for name in self.members:
                stack.callback(self.members[name].remove)
                self.start(name)
            yield self

    def start(self, name: str) -> None:
        """Starts a member where its peers reach it: the first time, or in its next life."""
        member = self.members[name]
        new = not member.exists
        member.start()
        for network in self._reaches[name][1:] if new else ():
            self._join(name, network)

    @contextmanager
    def cut_off(self, name: str) -> Generator[None]:
        """Nobody reaches the member meanwhile, and it reaches nobody."""
        self._leave(name)
        try:
            yield
        finally:
            for network in self._reaches[name]:
                self._join(name, network)

    def replace(self, name: str) -> None:
        """Puts a new container in a member's place, as when its host is gone.

        No packet tells its peers, nothing that it wrote outside of the run's directory is left, and
        its name leads to another address.
        """
        member = self.members[name]
        self._leave(name)
        member.remove()
        with DockerContainer("nats:2").with_network(self._network_of(name)):  # takes its address
            self.start(name)

    def _leave(self, name: str) -> None:
        for network in self._reaches[name]:
            there = self._engine.networks.get(self._networks[network].name)
            there.disconnect(self.members[name].docker)

    def _network_of(self, name: str) -> Network:
        return self._networks[self._reaches[name][0]]

    def _join(self, name: str, network: str) -> None:
        self._networks[network].connect(self.members[name].docker.id, [name])

    def _make(self, name: str) -> DockerContainer:
        if name == "redis":
            container = DockerContainer("redis:7", command=DURABLE)
        elif name == "nats":
            container = DockerContainer("nats:2", command="-js -sd /tmp/js")
        else:
            command = f"--config {RUN}/config/{name}.yaml"
            container = DockerContainer(container_images.name_of(name), command=command)
            container.with_volume_mapping(str(self.work), "/work", "rw")
            container.with_env("OMP_NUM_THREADS", "1")
            container.with_kwargs(user=user(), init=True, restart_policy={"Name": "on-failure"})
        return container.with_network(self._network_of(name)).with_network_aliases(name)

    def steps(self) -> int:
        """How often the trainer has finished a step, steps that it took twice included."""
        return len(written(self.work / RUN, "trainer", "step"))

    def goes_on(self, *, timeout_s: float = RECOVERY_S) -> float:
        """Seconds until two more steps were trained; fails where that takes too long."""
        aim = self.steps() + 2
        try:
            return until("two steps", lambda: self.steps() >= aim, timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"--- {name}\n{each.logs()}" for name, each in self.members.items())

    def ask(self, *words: str) -> tuple[int, str]:
        """Runs `treadle WORDS` where the ledger is reached; returns its status and stdout."""
        with ExitStack() as stack:
            image = container_images.name_of("experience")
            asked = DockerContainer(image, command=["-m", "treadle_cli.main", *words])
            asked.with_volume_mapping(str(self.work), "/work", "rw")
            asked.with_kwargs(user=user(), entrypoint="python")
            stack.enter_context(asked.with_network(self._networks["ledger"]))
            docker = asked.get_wrapped_container()
            status = docker.wait(timeout=2 * RECOVERY_S)["StatusCode"]
            return status, docker.logs(stdout=True, stderr=False).decode()

    def finish(self) -> None:
        """Lets the run end after a few more steps, and waits for its services to see that."""
        self.members["experience"].stop()
        path = self.work / RUN / "config" / "experience.yaml"
        settings = yaml.safe_load(path.read_text())
        last = max(row["step"] for row in written(self.work / RUN, "trainer", "step"))
        path.write_text(yaml.safe_dump(settings | {"steps": last + 3}))
        self.start("experience")
        for name in ("rollout", "trainer"):
            ended = self.members[name].docker.wait(timeout=2 * RECOVERY_S)
            assert ended["StatusCode"] == 0, self.members[name].logs()


def configure(work: Path) -> None:
    """Lays out a folder as a user has it, with a run that is configured and not started."""
    shutil.copytree(ROOT / "examples" / "calculator", work / "examples" / "calculator")
    shutil.copytree(ROOT / "recipes", work / "recipes")
    overlay = ["--overlay", "recipes/overlays/containers.yaml"]
    words = ["configure", "recipes/calculator.yaml", *OVERRIDES, *overlay]
    done = subprocess.run(
        [sys.executable, "-m", "treadle_cli.main", *words],
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if os.geteuid() == 0:
        for path in (work, *work.rglob("*")):
            os.chown(path, USER, USER)


def user() -> str:
    """Who the services run as: the images' user, or on a host of our own who runs the tests."""
    return f"{USER}:{USER}" if os.geteuid() == 0 else f"{os.geteuid()}:{os.getegid()}"
