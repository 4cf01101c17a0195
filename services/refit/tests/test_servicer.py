import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from treadle.refit.v1 import refit_service_pb2 as pb
from treadle.refit.v1 import refit_service_pb2_grpc as rpc
from treadle_core.errors import Kind
from treadle_refit.adapters.experience import ExperienceLedger
from treadle_refit.servicer import RefitServicer
from treadle_runtime.channel import call
from treadle_runtime.errors import RemoteError
from treadle_runtime.testing import running
from treadle_weights.layouts import whole
from treadle_weights.wire import layout_to_wire, load_order_from_wire

LAYOUT = layout_to_wire(whole({"a": ("float32", (4,)), "b": ("float32", (2,))}))
DIGESTS = {"a": f"{1:016x}", "b": f"{2:016x}"}
World = Any


@contextlib.asynccontextmanager
async def served(world: World) -> AsyncGenerator[Callable[..., Any]]:
    """Refit on a channel, behind it an experience on another; yields a caller of methods."""
    world.memory = memory = world.ledger
    async with running(world.register_experience, "treadle.experience") as ledger_channel:
        world.ledger = ExperienceLedger("run", ledger_channel)
        world.start_refit()
        servicer = RefitServicer("run", world.refit)
        async with running(servicer.register, "treadle.refit") as channel:
            stub = rpc.RefitServiceStub(channel)

            async def ask(method: str, **fields: Any) -> Any:
                request = getattr(pb, f"{method}Request")(**({"run_id": "run"} | fields))
                return await call(getattr(stub, method), request, timeout_s=10)

            yield ask
    world.ledger = memory


async def test_a_version_goes_from_a_trainer_through_the_ledger_to_an_engine(
    world: World,
) -> None:
    async with served(world) as ask:
        opened = await ask(
            "OpenVersion",
            trainer_epoch=1,
            step=3,
            request_id="r1",
            layout=LAYOUT,
            trace_id="ab" * 16,
        )
        sent = await ask("SendVersion", trainer_epoch=1, version=1, digests=DIGESTS)
        load = await ask("Attend", engine_id="e1", layout=LAYOUT, wait=Duration(seconds=9))
        install = await ask("Attend", engine_id="e1", layout=LAYOUT, verified=1)
        nothing = await ask("Attend", engine_id="e1", layout=LAYOUT, serving=1)
        demand = await ask("AwaitDemand", published_version=1)

    assert (opened.version, opened.arena.size) == (1, 72)
    assert (sent.members, sent.left_behind) == (0, 0)
    order = load_order_from_wire(load.load)
    assert (order.version, dict(order.digests)) == (1, {"a": 1, "b": 2})
    assert order.arena.path == opened.arena.path
    assert (install.install.version, install.install.trace_id) == (1, "ab" * 16)
    assert nothing.WhichOneof("order") is None
    assert not demand.wanted


async def test_an_alias_goes_from_a_trainer_to_an_engine_without_bytes(world: World) -> None:
    async with served(world) as ask:
        opened = await ask("OpenVersion", **OPEN)
        world.fill(opened.arena)
        await ask("SendVersion", **SEND)
        digest = world.memory.versions[1].weights_digest
        alias = OPEN | {"request_id": "r2", "step": 7, "alias_of": 1, "weights_digest": digest}
        again = await ask("OpenVersion", **alias)
        await ask("SendVersion", **SEND | {"version": 2})
        order = await ask("Attend", **ATTEND | {"serving": 1})

    assert (opened.aliased, again.aliased) == (False, True)
    assert again.arena == opened.arena
    assert order.alias == pb.AliasOrder(version=2, base=1)


OPEN = {"trainer_epoch": 1, "step": 0, "request_id": "r", "layout": LAYOUT}
SEND = {"trainer_epoch": 1, "version": 1, "digests": DIGESTS}
ATTEND = {"engine_id": "e1", "layout": LAYOUT}


def broken_layout() -> pb.Layout:
    layout = pb.Layout()
    layout.CopyFrom(LAYOUT)
    layout.rectangles[0].stop[0] = 2**40
    return layout


@pytest.mark.parametrize(
    ("method", "fields", "field"),
    [
        pytest.param("OpenVersion", OPEN | {"trainer_epoch": 0}, "trainer_epoch", id="epoch"),
        pytest.param("OpenVersion", OPEN | {"step": -1}, "step", id="step"),
        pytest.param("OpenVersion", OPEN | {"request_id": ""}, "request_id", id="no-request"),
        pytest.param("OpenVersion", OPEN | {"request_id": "a/b"}, "request_id", id="request"),
        pytest.param("OpenVersion", OPEN | {"layout": pb.Layout()}, "layout", id="no-layout"),
        pytest.param("OpenVersion", OPEN | {"layout": broken_layout()}, "a.stop", id="layout"),
        pytest.param("OpenVersion", OPEN | {"trace_id": "xyz"}, "trace_id", id="trace"),
        pytest.param("OpenVersion", OPEN | {"alias_of": -1}, "alias_of", id="alias"),
        pytest.param("SendVersion", SEND | {"version": 0}, "version", id="version"),
        pytest.param("SendVersion", SEND | {"digests": {"a": "1"}}, "digests[a]", id="digest"),
        pytest.param("AwaitDemand", {"published_version": -1}, "published_version", id="published"),
        pytest.param("AwaitDemand", {"wait": Duration(seconds=-1)}, "wait", id="demand-wait"),
        pytest.param("Attend", ATTEND | {"engine_id": "é"}, "engine_id", id="engine"),
        pytest.param("Attend", ATTEND | {"verified": -1}, "verified", id="verified"),
        pytest.param("Attend", ATTEND | {"serving": 4}, "serving", id="serving"),
        pytest.param("Attend", ATTEND | {"failed": -1}, "failed", id="failed"),
        pytest.param("Attend", ATTEND | {"layout": broken_layout()}, "a.stop", id="engine-layout"),
        pytest.param("Attend", ATTEND | {"wait": Duration(nanos=-1)}, "wait", id="attend-wait"),
    ],
)
async def test_a_bad_field_is_named(
    world: World, method: str, fields: dict[str, Any], field: str
) -> None:
    async with served(world) as ask:
        with pytest.raises(RemoteError) as raised:
            await ask(method, **fields)

    assert raised.value.kind is Kind.INVALID
    assert (raised.value.reason, raised.value.field) == ("INVALID_FIELD", field)
    assert raised.value.limit


@pytest.mark.parametrize(
    ("method", "fields"),
    [("OpenVersion", OPEN), ("SendVersion", SEND), ("AwaitDemand", {}), ("Attend", ATTEND)],
)
async def test_another_run_is_refused(world: World, method: str, fields: dict[str, Any]) -> None:
    async with served(world) as ask:
        with pytest.raises(RemoteError, match="other") as raised:
            await ask(method, **fields | {"run_id": "other"})

    assert (raised.value.kind, raised.value.reason) == (Kind.PRECONDITION, "WRONG_RUN")


async def test_refusals_of_the_state_carry_their_reasons(world: World) -> None:
    async def reason(method: str, **fields: Any) -> str:
        with pytest.raises(RemoteError) as raised:
            await ask(method, **fields)
        assert raised.value.kind is Kind.PRECONDITION
        return raised.value.reason

    world.ledger.trainer_epoch = 2
    async with served(world) as ask:
        assert await reason("OpenVersion", **OPEN) == "TRAINER_FENCED"
        assert await reason("SendVersion", **SEND) == "VERSION_ENDED"
        await ask("OpenVersion", **OPEN | {"trainer_epoch": 2})
        await ask("SendVersion", **SEND | {"trainer_epoch": 2})
        mismatched = layout_to_wire(whole({"a": ("bfloat16", (4,))}))
        assert await reason("Attend", **ATTEND | {"layout": mismatched}) == "LAYOUT_MISMATCH"


async def test_a_ledger_that_refuses_the_commit_ends_the_version(world: World) -> None:
    memory = world.ledger
    async with served(world) as ask:
        await ask("OpenVersion", **OPEN)
        await memory.abort(version=1, message="by hand")
        for _ in range(2):
            with pytest.raises(RemoteError, match=r"aborted|not in flight") as raised:
                await ask("SendVersion", **SEND)
            assert raised.value.reason == "VERSION_ENDED"
