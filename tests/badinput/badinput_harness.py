"""Real services as processes, called the way a broken peer calls them: one raw try each."""

import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import yaml
from e2e_harness import measures
from grpc_health.v1 import health_pb2, health_pb2_grpc

from treadle.episode.v1 import episode_pb2
from treadle.experience.v1 import experience_service_pb2 as experience_pb
from treadle.payload.v1 import payload_service_pb2 as payload_pb
from treadle.refit.v1 import refit_service_pb2 as refit_pb
from treadle_core.episodes import Segment
from treadle_experience import fsck
from treadle_payloads.codec import encode_payload
from treadle_runtime import errors

CONTRACTS = {"experience": experience_pb, "refit": refit_pb, "payload": payload_pb}
ROOT = Path(__file__).parent.parent.parent
RUN = "run"
PATIENCE_S = 60.0
"""For what takes well under a second, or a few where a service starts: two cores that others load
make tens of it. Only what never comes is to miss it."""


@dataclass(frozen=True)
class Refusal:
    """How a service refused a call."""

    code: str
    reason: str
    field: str
    message: str
    retry_after_s: float | None


@dataclass
class Peer:
    """A client of one service; `check` sees that it is still there after each call."""

    service: str
    address: str
    _channel: grpc.Channel = field(init=False)

    def __post_init__(self) -> None:
        unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        quick = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]
        options = [*unlimited, *quick, ("grpc.default_authority", "localhost")]
        self._channel = grpc.insecure_channel(self.address, options=options)

    @property
    def contract(self) -> Any:
        return CONTRACTS[self.service]

    @property
    def methods(self) -> dict[str, Any]:
        """Descriptor of each method, by name."""
        (service,) = self.contract.DESCRIPTOR.services_by_name.values()
        return {method.name: method for method in service.methods}

    def request(self, method: str, **fields: Any) -> Any:
        return getattr(self.contract, f"{method}Request")(**{"run_id": RUN} | fields)

    def send(
        self, method: str, request: Any, *, timeout: float | None = PATIENCE_S, **how: Any
    ) -> Any:
        """Sends a message, or bytes that may be none, once. Raises grpc.RpcError."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        path = f"/treadle.{self.service}.v1.{self.service.capitalize()}Service/{method}"
        answer = getattr(self.contract, f"{method}Response")
        call = self._channel.unary_unary(path, response_deserializer=answer.FromString)
        return call(data, timeout=timeout, wait_for_ready=True, **how)

    def __call__(self, method: str, **fields: Any) -> Any:
        return self.send(method, self.request(method, **fields))

    def tried(self, method: str, request: Any, **how: Any) -> Refusal | None:
        """None where the call was answered."""
        try:
            self.send(method, request, **how)
        except grpc.RpcError as error:
            return refusal(error)
        return None

    def refused(self, method: str, **fields: Any) -> Refusal:
        found = self.tried(method, self.request(method, **fields))
        assert found is not None, f"{method} was answered"
        return found

    def health(self) -> str:
        request = health_pb2.HealthCheckRequest()
        stub = health_pb2_grpc.HealthStub(self._channel)
        answer = stub.Check(request, timeout=PATIENCE_S, wait_for_ready=True)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    def close(self) -> None:
        self._channel.close()


def refusal(error: Any) -> Refusal:
    remote = errors.from_rpc_error(error, "peer")
    code = error.code().name
    typed = remote.reason not in ("PEER_AWAY", code)
    return Refusal(
        code,
        remote.reason if typed else "",
        remote.field,
        error.details() or "",
        remote.retry_after_s,
    )


@dataclass
class Service:
    """One service process, which may be started more than once."""

    name: str
    directory: Path
    settings: dict[str, Any]
    inside: tuple[str, ...] = ()
    """Words before the command: where to run it."""
    log: Path | None = None
    """Where it says what it does; a pipe that `ended` and `stop` read when there is none."""
    process: "subprocess.Popen[str] | None" = None

    def start(self, *overrides: str) -> "subprocess.Popen[str]":
        config = self.directory / f"{self.name}.yaml"
        config.write_text(yaml.safe_dump(self.settings), encoding="utf-8")
        module = ("-m", f"treadle_{self.name}.main", "--config", str(config))
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self.log.open("ab")) if self.log else None
            self.process = subprocess.Popen(
                [*self.inside, sys.executable, *module, *overrides],
                stderr=log or subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        return self.process

    def ended(self, *overrides: str) -> tuple[int, str]:
        """Starts it and waits for its end; the status, and what it said."""
        process = self.start(*overrides)
        _, said = process.communicate(timeout=PATIENCE_S)
        return process.returncode, said

    def stop(self) -> tuple[int, str]:
        """Drains it; the status, and what it said."""
        assert self.process is not None
        self.process.terminate()
        _, said = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, said

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            self.process.communicate()


def experience_settings(directory: Path, sockets: Path, **changed: Any) -> dict[str, Any]:
    """A run with plenty of tasks, whose leases last longer than a test."""
    tasks = directory / "tasks.jsonl"
    tasks.write_text('{"prompt": "1+1"}\n' * 64, encoding="utf-8")
    return {
        "run": {"id": RUN, "dir": str(directory), "model": str(directory)},
        "listen": f"unix:{sockets}/experience",
        "steps": 8,
        "tasks_per_step": 2,
        "group_size": 64,
        "max_lag": 1,
        "deadline_s": 600,
        "lease_s": 120,
        "source": {"name": "jsonl", "path": str(tasks)},
    } | changed


def refit_beside(run: Service) -> Service:
    """A refit that stands on the ledger of `run`."""
    settings = {
        "run": run.settings["run"],
        "listen": f"unix:{run.directory}/refit",
        "experience_address": run.settings["listen"],
        "transport": {"name": "shared_memory", "directory": str(run.directory)},
    }
    return Service("refit", run.directory, settings, run.inside)


def begin_without_version(peer: Peer) -> None:
    peer("AcquireRun", holder="trainer")
    peer("CommitCheckpoint", trainer_epoch=1, digest="a" * 64, step=0, path="c/0")


def begin(peer: Peer) -> None:
    """What a trainer does before its first claim."""
    begin_without_version(peer)
    peer("AnnounceVersion", trainer_epoch=1, step=0, request_id="v1")
    peer("CommitVersion", trainer_epoch=1, version=1, weights_digest="0" * 16)


LEASE = {"replica_id": "r1", "served_version": 1, "max_tickets": 1, "slots": 1024}


def lease(peer: Peer, **changed: Any) -> list[Any]:
    return list(peer("LeaseTickets", **LEASE | changed).tickets)


def attempt(ticket: Any, number: int | None = None) -> Any:
    return experience_pb.Attempt(episode_id=ticket.episode_id, attempt=number or ticket.attempt)


def segment(tokens: int = 4, *, version: int = 1) -> Segment:
    """Half prompt, half sampled."""
    sampled = np.arange(tokens) >= tokens // 2
    versions = np.where(sampled, version, -1).astype(np.int32)
    return Segment(
        token_ids=np.arange(tokens, dtype=np.int32),
        sampled=sampled,
        trained=sampled.copy(),
        logprobs=np.where(sampled, np.float32(-0.5), np.float32(0)).astype(np.float32),
        policy_version=versions,
        context_version=versions.copy(),
    )


def result(data: bytes | None = None, **changed: Any) -> Any:
    """A result whose payload is `data`; without any, one that is right."""
    data = encode_payload([segment()]) if data is None else data
    payload = episode_pb2.Payload(
        sha256=hashlib.sha256(data).hexdigest(), size=len(data), inline=data
    )
    values = {
        "reward": 1.0,
        "termination": episode_pb2.TERMINATION_FINISHED,
        "num_tokens": 4,
        "num_trained": 2,
        "versions": [1],
        "payload": payload,
    }
    return episode_pb2.EpisodeResult(**values | changed)


def completion(ticket: Any, of: Any | None = None) -> dict[str, Any]:
    return {"replica_id": "r1", "attempt": attempt(ticket), "result": of or result()}


def sums(directory: Path) -> dict[str, int]:
    """What `treadle fsck` counts in a run; fails where a goal does not hold."""
    found = list(fsck.measure(fsck.examine(directory)))
    assert [each for each in found if not each.holds] == []
    return {each.measure: each.value for each in found}


def until(holds: Callable[[], bool], *, timeout_s: float = PATIENCE_S) -> None:
    """Looks until something holds that happens in another process."""
    give_up = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up, "time is up"
        time.sleep(0.02)


@contextlib.contextmanager
def serving(service: Service) -> Iterator[Peer]:
    """Runs a service and calls it; the process is gone at the end."""
    service.start()
    peer = Peer(service.name, service.settings["listen"])
    try:
        yield peer
    finally:
        peer.close()
        service.kill()


@dataclass
class Disk:
    """A small file system that only this test's processes see."""

    path: Path
    """Where it is, for processes that run `inside`."""
    holder: int
    """A process that lives there."""

    @property
    def inside(self) -> tuple[str, ...]:
        return ("nsenter", "-t", str(self.holder), "-m", f"--wd={ROOT}")

    def seen(self, *parts: str) -> Path:
        """A path on the disk, as this process may open it."""
        return Path(f"/proc/{self.holder}/root").joinpath(*self.path.parts[1:], *parts)

    def fill(self) -> None:
        """Leaves no room."""
        for size in (1 << 20, 512):
            with contextlib.suppress(OSError), self.seen("balloon").open("ab", 0) as file:
                while file.write(b"\0" * size):
                    pass

    def make_room(self) -> None:
        self.seen("balloon").unlink()

    def fsck(self, *parts: str) -> dict[str, Any]:
        """Measures of `treadle fsck` on the disk; fails where a goal does not hold."""
        run = str(self.path.joinpath(*parts))
        command = [*self.inside, sys.executable, "-m", "treadle_cli.main", "fsck", run]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return measures(done.stdout)


@contextlib.contextmanager
def mounted(size: str, path: Path) -> Iterator[Disk | None]:
    """A disk of `size` at `path`; None where mounting is not permitted."""
    script = f"mount -t tmpfs -o size={size} tmpfs {path} && echo ready && exec sleep 600"
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            ready = holder.stdout is not None and holder.stdout.readline() == "ready\n"
            yield Disk(path, holder.pid) if ready else None
        finally:
            holder.kill()


@dataclass
class World:
    """A run in progress, and its service."""

    service: Service
    peer: Peer

    def ticket(self) -> Any:
        (ticket,) = lease(self.peer)
        return ticket

    def ledger(self) -> tuple[Any, dict[str, int]]:
        """What the service says of the run, and what its file says."""
        return self.peer("GetRun"), sums(self.service.directory)

    def holds_after(self, before: Any, ticket: Any) -> None:
        """The process is up, the ledger is what it was, and a good result is taken."""
        assert self.service.is_up
        assert self.ledger() == before
        assert not self.peer("CompleteEpisode", **completion(ticket)).duplicate
