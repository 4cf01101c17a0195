"""A Ray cluster of two nodes on loopback, and what tests want to know of it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from treadle_payloads.files import FileStore
from treadle_payloads.ray_cache import RayCache
from treadle_payloads.ray_cluster import END, RayConfig, child_environment
from treadle_payloads.ray_sidecar import command
from treadle_payloads.store import PayloadReference

STORE_BYTES = 100 << 20
PATIENCE_S = 60.0
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_NODES = """
import json, os, sys
from ray.cluster_utils import Cluster
os.makedirs(os.environ["RAY_TMPDIR"] + "/ray")  # where it writes the address, and makes no folder
options = {"num_cpus": 1, "object_store_memory": int(sys.argv[1]), "node_ip_address": "127.0.0.1"}
first = options | {"include_dashboard": False, "temp_dir": sys.argv[2]}
cluster = Cluster(initialize_head=True, head_node_args=first)
try:
    second = cluster.add_node(**options)
    nodes = {"head": cluster.head_node, "second": second}
    raylets = {name: node.all_processes["raylet"][0].process.pid for name, node in nodes.items()}
    gcs = cluster.head_node.all_processes["gcs_server"][0].process.pid
    processes = raylets | {"gcs": gcs}
    print(json.dumps([cluster.address, second.node_id, processes]), flush=True)
    sys.stdin.read()
finally:
    cluster.shutdown()
"""
_PROBE = """
import json, sys, ray
from treadle_payloads.ray_cluster import join, owner_of
join(sys.argv[1])
for line in sys.stdin:
    if line == "used\\n":
        total, free = ray.cluster_resources(), ray.available_resources()
        answer = total["object_store_memory"] - free.get("object_store_memory", 0)
    else:
        namespace, node = line.split()
        owner = owner_of(node, namespace)
        try:
            life, process = ray.get([owner.lend.remote([]), owner.process.remote()], timeout=5)
            answer = life.life, process
        except (AttributeError, ray.exceptions.RayError):
            answer = None
    print(json.dumps(answer), flush=True)
"""


@dataclass
class Cluster:
    """Readers join its first node, `head`; owners of tests live on its second, `second`."""

    address: str
    second: str
    """The second node's id."""
    processes: dict[str, int]
    """Of the raylets of both, and of the head's `gcs`."""
    probe: "subprocess.Popen[str]"

    def signal(self, name: str, signum: signal.Signals) -> None:
        os.kill(self.processes[name], signum)

    def used_bytes(self) -> int:
        """Of all object stores."""
        return self._ask("used")

    def owner(self, namespace: str, node: str) -> tuple[int, int] | None:
        """Life and process of an owner, if it answers."""
        return self._ask(f"{namespace} {node}")

    def _ask(self, question: str) -> Any:
        assert self.probe.stdin is not None
        print(question, file=self.probe.stdin, flush=True)
        return _said(self.probe)


@contextlib.contextmanager
def two_nodes() -> Iterator[Cluster]:
    old = os.environ.copy()
    os.environ.update(_ENVIRONMENT)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="treadle-ray-", ignore_cleanup_errors=True) as logs,
            _script(_NODES, str(STORE_BYTES), logs, RAY_TMPDIR=logs) as nodes,
        ):
            address, second, processes = _said(nodes)
            with _script(_PROBE, address) as probe:
                yield Cluster(address, second, processes, probe)
                probe.kill()
    finally:
        for name in _ENVIRONMENT.keys() - old.keys():
            del os.environ[name]


@contextlib.contextmanager
def _script(code: str, *arguments: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """Ends with its stdin."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**child_environment("127.0.0.1:1"), **environment},
    )
    with process:
        yield process


def _said(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@dataclass
class Node:
    """A spool whose payloads a cluster owns on its second node."""

    cluster: Cluster
    directory: Path
    name: str
    tender: "subprocess.Popen[bytes] | None" = None
    references: list[PayloadReference] = field(default_factory=list)

    @property
    def config(self) -> RayConfig:
        return RayConfig(address=self.cluster.address, namespace="run", bytes=STORE_BYTES // 2)

    def put(self, *contents: bytes) -> list[PayloadReference]:
        files = FileStore(self.directory)
        new = [replace(files.put(data), node=self.name, epoch=1) for data in contents]
        self.references += new
        return new

    def start(self) -> None:
        self.tender = subprocess.Popen(
            command(self.config, self.name, self.directory, ray_node=self.cluster.second),
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(child_environment(self.cluster.address)),
        )

    def owner(self) -> tuple[int, int]:
        """Life and process."""
        return until(lambda: self.cluster.owner("run", self.name))

    def stop(self) -> None:
        if self.tender is not None:
            self.tender.communicate(END, PATIENCE_S)
            self.tender = None


def until(get: Callable[[], Any]) -> Any:
    """The first answer that is one."""
    give_up = time.monotonic() + PATIENCE_S
    while not (answer := get()):
        assert time.monotonic() < give_up, "nothing came of it"
        time.sleep(0.05)
    return answer


def joined(cache: RayCache, references: list[PayloadReference]) -> dict[str, memoryview]:
    """What the cache has once its child has joined and asked."""
    return until(lambda: cache.get_many(references, 5.0))
