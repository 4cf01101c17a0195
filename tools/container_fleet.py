"""A run whose services, sidecar, Redis and NATS are containers, on networks of their own.

Only the experience service reaches Redis. The run's directory is a folder of this host that all
services mount, and which is read here; weights go through it too. The engine takes the place of a
supervisor only for a service that ends by itself with a failure: who was killed is started again
by whoever did it.
"""

import contextlib
import json
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
from container_members import DURABLE, RECOVERY_S, Member, published, until
from small_run import GROUP_SIZE, RECIPE, ROOT, TREADLE, Journal, RunFailedError, bodies
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

from treadle_cli.rows import written
from treadle_experience.adapters.redis_ledger import RedisLedger

PORTS = {"experience": 7001, "rollout": 7002, "trainer": 7003, "refit": 7004, "payloads": 7005}
"""Where those listen that have an image of ours."""
REDIS_PORT = 6379
RUN = "runs/fleet"
UPLOAD = f"{RUN}/upload.sock"
USER = 10001
"""Of the images."""
START_S = 3 * RECOVERY_S
END_S = 4 * RECOVERY_S
OVERRIDES = (
    f"run.dir={RUN}",
    "experience.steps=5000",
    "experience.tasks_per_step=4",
    f"experience.group_size={GROUP_SIZE}",
    "experience.evaluation=null",
    "experience.lease_s=3",
    "experience.retries=20",
    "run.inline_bytes=640",
    "rollout.slots=16",
    "trainer.checkpoint_every=2",
)


class Fleet:
    """The containers by name, and what the run's directory says."""

    def __init__(
        self, work: Path, engine: Any, *overrides: str, node: str = "payloads:7005"
    ) -> None:
        """`work` is where the services work: the recipe, its example and the run's directory.

        `overrides` as `treadle configure` takes them; at `node` readers reach the sidecar.
        """
        self.work = work
        self._engine = engine
        self._overrides = overrides
        self._node = node
        self._networks: dict[str, Network] = {}
        self._reaches: dict[str, tuple[str, ...]] = {
            "redis": ("ledger",),
            "nats": ("control",),
            "experience": ("control", "ledger"),
            **dict.fromkeys(("refit", "rollout", "trainer", "payloads"), ("control",)),
        }
        self.members = {name: Member(lambda name=name: self._make(name)) for name in self._reaches}

    @contextmanager
    def laid_out(self) -> Generator[None]:
        """A run that is configured, and networks; removes all that came onto them."""
        configure(self.work, *self._overrides, node=self._node)
        with ExitStack() as stack:
            for name in ("control", "ledger"):
                self._networks[name] = stack.enter_context(Network())
            for member in self.members.values():
                stack.callback(member.remove)
            yield

    def start_all(self) -> None:
        """Starts all members, who then go on without a word."""
        for name in self.members:
            self.start(name)

    def join_all(self, container: DockerContainer, name: str) -> DockerContainer:
        """Starts a container that is no member where all members reach it by a name."""
        first, *others = self._networks.values()
        started = container.with_network(first).with_network_aliases(name).start()
        for network in others:
            network.connect(started.get_container_id(), [name])
        return started

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
        self.leave(name)
        try:
            yield
        finally:
            self.come_back(name)

    def replace(self, name: str) -> None:
        """Puts a new container in a member's place, as when its host is gone.

        No packet tells its peers, nothing that it wrote outside of the run's directory is left, and
        its name leads to another address.
        """
        member = self.members[name]
        self.leave(name)
        member.remove()
        with DockerContainer("nats:2").with_network(self._network_of(name)):  # takes its address
            self.start(name)

    def leave(self, name: str) -> None:
        """Takes all networks from a member."""
        for network in self._reaches[name]:
            there = self._engine.networks.get(self._networks[network].name)
            there.disconnect(self.members[name].docker)

    def come_back(self, name: str) -> None:
        """Gives them back."""
        for network in self._reaches[name]:
            self._join(name, network)

    def _network_of(self, name: str) -> Network:
        return self._networks[self._reaches[name][0]]

    def _join(self, name: str, network: str) -> None:
        self._networks[network].connect(self.members[name].docker.id, [name])

    def _make(self, name: str) -> DockerContainer:
        if name == "redis":
            container = published(DockerContainer("redis:7", command=DURABLE), REDIS_PORT)
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
        return len(self._steps())

    def step(self) -> int:
        """Last step that the trainer finished."""
        return max(self._steps(), default=0)

    def _steps(self) -> list[int]:
        return [row["step"] for row in written(self.work / RUN, "trainer", "step")]

    def goes_on(self, *, timeout_s: float = RECOVERY_S) -> float:
        """Seconds until two more steps were trained; fails where that takes too long."""
        aim = self.steps() + 2
        try:
            return until("two steps", lambda: self.steps() >= aim, timeout_s=timeout_s)
        except RunFailedError as error:
            raise RunFailedError(f"{error}\n{self.logs()}") from None

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"--- {name}\n{each.logs()}" for name, each in self.members.items())

    def ask(self, *words: str) -> tuple[int, str]:
        """Runs `treadle WORDS` where the ledger is reached; returns its status and stdout."""
        with ExitStack() as stack:
            image = container_images.name_of("experience")
            asked = DockerContainer(image).with_command([*TREADLE, *words])
            asked.with_volume_mapping(str(self.work), "/work", "rw")
            asked.with_kwargs(user=user(), entrypoint="python")
            stack.enter_context(asked.with_network(self._networks["ledger"]))
            docker = asked.get_wrapped_container()
            status = docker.wait(timeout=2 * RECOVERY_S)["StatusCode"]
            return status, docker.logs(stdout=True, stderr=False).decode()

    def finish(self, *, steps: int = 3) -> int:
        """Lets the run end after so many more steps, and waits for its services to see that.

        Returns the last one. Raises RunFailedError where a service does not end well.
        """
        self.members["experience"].stop()
        path = self.work / RUN / "config" / "experience.yaml"
        settings = yaml.safe_load(path.read_text())
        last = self.step() + steps
        path.write_text(yaml.safe_dump(settings | {"steps": last}))
        self.start("experience")
        for name in ("rollout", "trainer"):
            ended = self.members[name].docker.wait(timeout=END_S)
            if ended["StatusCode"] != 0:
                raise RunFailedError(f"{name} ended with {ended['StatusCode']}\n{self.logs()}")
        return last

    def fsck(self) -> tuple[bool, dict[str, Any]]:
        """Whether `treadle fsck` holds, and its values by name."""
        status, printed = self.ask("fsck", RUN)
        rows = [json.loads(line) for line in printed.splitlines()]
        return status == 0, {row["measure"]: row["value"] for row in rows}

    def journal(self) -> Journal:
        """All transitions of its ledger, read from this host."""
        url = f"redis://127.0.0.1:{self.members['redis'].port_of(REDIS_PORT)}/0"
        with contextlib.closing(RedisLedger(self.work / RUN, url)) as ledger:
            return bodies(ledger.read().journal)


def configure(work: Path, *overrides: str, node: str) -> None:
    """Lays out a folder as a user has it, with a run that is configured and not started."""
    shutil.copytree(ROOT / "examples" / "calculator", work / "examples" / "calculator")
    shutil.copytree(ROOT / "recipes", work / "recipes")
    overlay = ["--overlay", "recipes/overlays/containers.yaml"]
    payloads = f"run.payloads={{name: sidecar, upload: {UPLOAD}, node: '{node}'}}"
    done = subprocess.run(  # noqa: S603, the command that is under test
        [sys.executable, *TREADLE, "configure", RECIPE, *OVERRIDES, *overrides, payloads, *overlay],
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RunFailedError(done.stdout + done.stderr)
    _configure_sidecar(work / RUN / "config", node)
    if os.geteuid() == 0:
        for path in (work, *work.rglob("*")):
            os.chown(path, USER, USER)


def _configure_sidecar(folder: Path, node: str) -> None:
    """As docs/deploying.md says it."""
    told = yaml.safe_load((folder / "experience.yaml").read_text())
    settings = {
        "run": told["run"],
        "listen": f"0.0.0.0:{PORTS['payloads']}",
        "node": node,
        "upload": UPLOAD,
        "experience_address": f"experience:{PORTS['experience']}",
    }
    (folder / "payloads.yaml").write_text(yaml.safe_dump(settings))


def user() -> str:
    """Who the services run as: the images' user, or on a host of our own who runs the tests."""
    return f"{USER}:{USER}" if os.geteuid() == 0 else f"{os.geteuid()}:{os.getegid()}"
