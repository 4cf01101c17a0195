import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from treadle_runtime import address, channel, probe
from treadle_runtime.drain_order import SUPERVISOR_FD

pytestmark = pytest.mark.processes

SCRIPT = str(Path(__file__).parent / "lone_service.py")


class Lone:
    def __init__(self, directory: Path) -> None:
        self.address = f"unix:{directory / 's'}"
        self.mark = directory / "mark"
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self, does: str, *, address: str = "", supervisor: int | None = None
    ) -> subprocess.Popen[str]:
        env = os.environ | ({SUPERVISOR_FD: str(supervisor)} if supervisor is not None else {})
        process = subprocess.Popen(
            [sys.executable, SCRIPT, address or self.address, does, str(self.mark)],
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            pass_fds=[supervisor] if supervisor is not None else [],
        )
        self.started.append(process)
        return process

    async def health(self) -> int:
        async with channel.connect(self.address) as there:
            stub = health_pb2_grpc.HealthStub(there)
            request = health_pb2.HealthCheckRequest(service="treadle.lone.v1.LoneService")
            response = await channel.call(stub.Check, request, timeout_s=2, budget_s=20)
            return response.status

    def wait_for(self, process: subprocess.Popen[str], words: str) -> None:
        """Reads what a process says until it says this."""
        assert process.stderr is not None
        for line in process.stderr:
            if words in line:
                return
        raise AssertionError(f"ended without {words!r}")

    def ended(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        _, err = process.communicate(timeout=20)
        return process.returncode, err


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Lone]:
    service = Lone(tmp_path)
    yield service
    for process in service.started:
        if process.poll() is None:
            process.kill()
        process.communicate()


async def test_serves_health_and_reflection_until_sigterm_then_drains(lone: Lone) -> None:
    process = lone.start("run")
    assert await lone.health() == health_pb2.HealthCheckResponse.SERVING
    async with channel.connect(lone.address) as there:
        stub = reflection_pb2_grpc.ServerReflectionStub(there)
        call = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        answer = await call.read()
        assert answer is not grpc.aio.EOF
        names = [service.name for service in answer.list_services_response.service]
    assert "grpc.health.v1.Health" in names

    process.send_signal(signal.SIGTERM)

    code, _ = lone.ended(process)
    assert code == 0
    assert lone.mark.read_text() == "drained"


async def test_drains_when_its_supervisor_is_gone(lone: Lone) -> None:
    read, write = os.pipe()
    process = lone.start("run", supervisor=read)
    os.close(read)
    assert await lone.health() == health_pb2.HealthCheckResponse.SERVING

    os.close(write)

    code, _ = lone.ended(process)
    assert (code, lone.mark.read_text()) == (0, "drained")


def test_ends_by_itself_when_its_work_is_done(lone: Lone) -> None:
    code, _ = lone.ended(lone.start("return"))

    assert code == 0


def test_failed_work_ends_the_process_with_its_cause(lone: Lone) -> None:
    code, err = lone.ended(lone.start("fail"))

    assert code == 1
    assert "the work failed" in err
    assert not lone.mark.exists()


def test_refuses_to_listen_beyond_loopback(lone: Lone) -> None:
    code, err = lone.ended(lone.start("run", address="0.0.0.0:0"))

    assert code == 2
    assert "listen: expected" in err


async def test_a_probe_says_whether_a_service_serves(lone: Lone) -> None:
    process = lone.start("run")
    assert await lone.health() == health_pb2.HealthCheckResponse.SERVING
    assert probe.main([lone.address]) == 0

    process.kill()
    lone.ended(process)

    assert probe.main([lone.address]) == 1


async def test_a_successor_waits_for_the_address(lone: Lone) -> None:
    first = lone.start("run")
    assert await lone.health() == health_pb2.HealthCheckResponse.SERVING
    second = lone.start("run")
    assert second.poll() is None

    first.send_signal(signal.SIGTERM)
    assert lone.ended(first)[0] == 0

    assert await lone.health() == health_pb2.HealthCheckResponse.SERVING
    second.send_signal(signal.SIGTERM)
    assert lone.ended(second)[0] == 0


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_standby_follows_a_holder_that_died_and_ends_one_that_stands_still(
    lone: Lone, signum: signal.Signals
) -> None:
    first = lone.start("run")
    assert await lone.health() == health_pb2.HealthCheckResponse.SERVING
    second = lone.start("run")
    lone.wait_for(second, "standing by")

    first.send_signal(signum)

    lone.wait_for(second, "serving on")
    assert await lone.health() == health_pb2.HealthCheckResponse.SERVING
    assert first.wait(1) == -signal.SIGKILL
    second.send_signal(signal.SIGTERM)
    assert lone.ended(second)[0] == 0


async def test_a_holder_that_is_alive_keeps_its_address(lone: Lone) -> None:
    first = lone.start("run")
    assert await lone.health() == health_pb2.HealthCheckResponse.SERVING
    second = lone.start("run")
    lone.wait_for(second, "standing by")

    with pytest.raises(subprocess.TimeoutExpired):  # longer than a silence that would end it
        first.wait(address.SILENCE_S + 2)

    assert second.poll() is None
    assert await lone.health() == health_pb2.HealthCheckResponse.SERVING


def test_a_process_that_has_the_id_of_the_silent_holder_is_not_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    address._end(f"{os.getpid()} 12345 7".encode().ljust(64))

    assert "out of reach" in caplog.text
