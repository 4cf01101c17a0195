import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from treadle_core.errors import InvalidFieldError, Kind, TreadleError
from treadle_runtime import channel, errors
from treadle_runtime.errors import RemoteError
from treadle_runtime.testing import running


class FullError(TreadleError):
    kind = Kind.EXHAUSTED
    reason = "FULL"


class Failing(health_pb2_grpc.HealthServicer):
    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.calls = 0

    async def Check(self, request: object, context: object) -> health_pb2.HealthCheckResponse:
        self.calls += 1
        if self._error is None:
            await asyncio.sleep(3600)
        assert self._error is not None
        raise self._error


async def told(error: Exception | None, *, timeout_s: float = 5) -> RemoteError:
    servicer = Failing(error)

    def register(server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)

    async with running(register, "treadle.test") as there:
        stub = health_pb2_grpc.HealthStub(there)
        with pytest.raises(RemoteError) as caught:
            await channel.call(stub.Check, health_pb2.HealthCheckRequest(), timeout_s=timeout_s)
    return caught.value


async def test_a_typed_error_arrives_with_all_it_said() -> None:
    remote = await told(InvalidFieldError("episode_id", limit="an id", value="'../x'"))

    assert (remote.kind, remote.reason) == (Kind.INVALID, "INVALID_FIELD")
    assert (remote.field, remote.limit, remote.value) == ("episode_id", "an id", "'../x'")
    assert remote.message == "episode_id: expected an id, got '../x'"


async def test_when_to_retry_travels_too() -> None:
    remote = await told(FullError("the spool is full", retry_after_s=1.5))

    assert (remote.reason, remote.retry_after_s) == ("FULL", 1.5)


async def test_an_unexpected_error_shows_no_trace_to_the_client() -> None:
    remote = await told(RuntimeError("secret"))

    assert (remote.kind, remote.reason) == (Kind.BROKEN, "INTERNAL")
    assert "secret" not in remote.message


async def test_a_silent_peer_is_away_after_the_deadline() -> None:
    remote = await told(None, timeout_s=0.2)

    assert (remote.kind, remote.reason) == (Kind.UNAVAILABLE, errors.PEER_AWAY)


async def test_an_absent_peer_is_away_after_the_budget(tmp_path: object) -> None:
    async with channel.connect(f"unix:{tmp_path}/nobody") as there:
        stub = health_pb2_grpc.HealthStub(there)
        with pytest.raises(RemoteError, match="UNAVAILABLE") as caught:
            await channel.call(
                stub.Check, health_pb2.HealthCheckRequest(), timeout_s=1, budget_s=0.3
            )
    assert caught.value.reason == errors.PEER_AWAY


class ReplacedError(TreadleError):
    kind = Kind.PRECONDITION
    reason = "WRITER_FENCED"


class Fenced(health_pb2_grpc.HealthServicer):
    """Answers as one that was replaced, and then as its successor at the same address."""

    def __init__(self) -> None:
        self.calls = 0

    async def Check(self, request: object, context: object) -> health_pb2.HealthCheckResponse:
        self.calls += 1
        if self.calls == 1:
            raise ReplacedError("writer epoch 1 is fenced by epoch 2")
        return health_pb2.HealthCheckResponse(status=1)


async def test_a_caller_of_a_process_that_was_replaced_asks_its_successor() -> None:
    servicer = Fenced()

    def register(server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)

    async with running(register, "treadle.test") as there:
        stub = health_pb2_grpc.HealthStub(there)
        answer = await channel.call(
            stub.Check, health_pb2.HealthCheckRequest(), timeout_s=5, budget_s=5
        )

    assert (answer.status, servicer.calls) == (1, 2)


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_has_a_status(kind: Kind) -> None:
    assert isinstance(errors.STATUS_OF_KIND[kind], grpc.StatusCode)
