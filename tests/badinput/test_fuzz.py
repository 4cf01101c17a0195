"""Whatever bytes come, a service answers with a status that says what is wrong, and counts right.

Requests are made from the contract: any message, its valid form with some fields changed, and that
form's bytes with some changed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from badinput_harness import (
    LEASE,
    RUN,
    Peer,
    Service,
    begin,
    completion,
    experience_settings,
    lease,
    refit_beside,
    refusal,
    serving,
    sums,
)
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle_weights.layouts import whole
from treadle_weights.wire import layout_to_wire

pytestmark = pytest.mark.processes

QUICK = settings(
    max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
LAYOUT = layout_to_wire(whole({"a": ("float32", (4,))}))
VALID: dict[str, Callable[["World"], dict[str, Any]]] = {
    "LeaseTickets": lambda world: LEASE,
    "RenewLeases": lambda world: {"replica_id": "r1"},
    "CompleteEpisode": lambda world: completion(world.ticket),
    "FailEpisode": lambda world: {**world.attempt, "failure_class": 2},
    "ReturnTickets": lambda world: {"replica_id": "r1", "attempts": [world.attempt["attempt"]]},
    "AcquireRun": lambda world: {"holder": "trainer", "checkpoint_digest": "a" * 64},
    "ClaimStep": lambda world: {"trainer_epoch": 1, "step": 1},
    "HandBackStep": lambda world: {"trainer_epoch": 1, "step": 1},
    "ReportStep": lambda world: {"trainer_epoch": 1, "step": 1, "metrics": {"loss": 0.5}},
    "CommitCheckpoint": lambda world: {
        "trainer_epoch": 1,
        "digest": "b" * 64,
        "parent_digest": "a" * 64,
        "path": "c/1",
    },
    "AnnounceVersion": lambda world: {"trainer_epoch": 1, "request_id": "x"},
    "CommitVersion": lambda world: {
        "trainer_epoch": 1,
        "version": 1,
        "weights_digest": "0" * 16,
    },
    "AbortVersion": lambda world: {"version": 2, "message": "gone"},
    "GetRun": lambda world: {},
    "CheckPayloads": lambda world: {"sha256s": ["0" * 64]},
    "PreviewSteps": lambda world: {"max_steps": 1},
    "OpenVersion": lambda world: {"trainer_epoch": 1, "request_id": "r", "layout": LAYOUT},
    "SendVersion": lambda world: {"trainer_epoch": 1, "version": 3, "digests": {"a": "0" * 16}},
    "AwaitDemand": lambda world: {"published_version": 1},
    "Attend": lambda world: {"engine_id": "e1", "layout": LAYOUT, "draining": True},
}


@dataclass
class World:
    """Two services over one ledger, and what was acknowledged."""

    peers: dict[str, Peer]
    run: Service
    ticket: Any
    acknowledged: set[str] = field(default_factory=set[str])

    @property
    def attempt(self) -> dict[str, Any]:
        return {name: completion(self.ticket)[name] for name in ("replica_id", "attempt")}


@pytest.fixture(scope="module")
def world(tmp_path_factory: Any) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("run")
    run = Service("experience", directory, experience_settings(directory, directory))
    refit = refit_beside(run)
    with serving(run) as experience, serving(refit) as peer:
        begin(experience)
        (ticket,) = lease(experience)
        yield World({"experience": experience, "refit": peer}, run, ticket)
        ended = [service.stop() for service in (refit, run)]
        assert [status for status, _ in ended] == [0, 0]
        assert "Traceback" not in "".join(said for _, said in ended)


NUMBERS = [0, 1, -1, 2, 3, 2**31 - 1, -(2**31)]
TEXTS = ["", RUN, "r1", "a/b", "..", "a\0b", "\n", "é" * 200, "0" * 16, "a" * 64, "%s{0}$(x)"]
VALUES: dict[int, Any] = {
    FieldDescriptor.CPPTYPE_INT32: st.sampled_from(NUMBERS),
    FieldDescriptor.CPPTYPE_INT64: st.sampled_from([*NUMBERS, 2**63 - 1, -(2**63)]),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_STRING: st.sampled_from(TEXTS),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(-1, 9),
}
WAITS = [Duration(), Duration(nanos=1000), Duration(seconds=-1), Duration(nanos=-5)]


def value_of(field: FieldDescriptor) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=40)
    if field.message_type is None:
        return VALUES[field.cpp_type]
    if field.message_type.full_name == Duration.DESCRIPTOR.full_name:
        return st.sampled_from(WAITS)  # short, since each is waited for
    return message_of(field.message_type)


def values_of(field: FieldDescriptor) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return st.dictionaries(value_of(key), value_of(value), max_size=3)
    if field.is_repeated:
        return st.lists(value_of(field), max_size=3)
    return value_of(field)


def fields_of(descriptor: Descriptor) -> Any:
    """Some of the fields of a message, with any values."""
    fields = [field for field in descriptor.fields if field.name != "run_id"]
    return st.fixed_dictionaries({}, optional={field.name: values_of(field) for field in fields})


def message_of(descriptor: Descriptor) -> Any:
    made = GetMessageClass(descriptor)
    return fields_of(descriptor).map(lambda fields: made(**fields))


def changed_bytes(data: bytes, changes: list[tuple[int, int]], cut: int) -> bytes:
    changed = bytearray(data)
    for place, byte in changes:
        if changed:
            changed[place % len(changed)] = byte
    return bytes(changed[: len(changed) - cut] if cut < len(changed) else changed)


CHANGES = st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 255)), min_size=1, max_size=3)


def methods(service: str) -> list[str]:
    (found,) = Peer(service, "unix:unused").contract.DESCRIPTOR.services_by_name.values()
    return [method.name for method in found.methods]


@pytest.mark.parametrize(
    ("service", "method"),
    [(service, method) for service in ("experience", "refit") for method in methods(service)],
)
def test_no_request_breaks_a_service_or_its_sums(world: World, service: str, method: str) -> None:
    peer = world.peers[service]
    valid = VALID[method](world)
    descriptor = peer.request(method).DESCRIPTOR

    @QUICK
    @given(fields_of(descriptor), CHANGES, st.integers(0, 8), st.integers(0, 2))
    def check(fields: dict[str, Any], changes: Any, cut: int, form: int) -> None:
        request: Any = peer.request(method, **(fields if form == 0 else valid | fields))
        if form == 2:
            data = peer.request(method, **valid).SerializeToString()
            request = changed_bytes(data, changes, cut)
        try:
            answer = peer.send(method, request, timeout=20)
        except grpc.RpcError as error:
            found = refusal(error)
            assert found.code in REFUSALS, found
            assert found.reason, found
        else:
            note(world, method, request, answer)

    check()

    counted = sums(world.run.directory)
    assert counted["acknowledged"] == len(world.acknowledged)
    assert world.peers["experience"]("GetRun").position == counted["position"]


REFUSALS = {
    "INVALID_ARGUMENT",
    "FAILED_PRECONDITION",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "DATA_LOSS",
}


def note(world: World, method: str, request: Any, answer: Any) -> None:
    """Remembers an episode whose result was acknowledged."""
    if method == "CompleteEpisode":
        if isinstance(request, bytes):
            peer = world.peers["experience"]
            request = type(peer.request(method)).FromString(request)
        world.acknowledged.add(request.attempt.episode_id)
