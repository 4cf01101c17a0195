"""What broken trainers and engines send to refit: refused by name, and the ledger stays."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from badinput_harness import Peer, Service, begin, experience_settings, refit_beside, serving, sums

from treadle.refit.v1 import refit_service_pb2 as pb
from treadle_runtime.channel import MESSAGE_LIMIT
from treadle_runtime.fields import duration
from treadle_weights.layouts import whole
from treadle_weights.wire import layout_to_wire

pytestmark = pytest.mark.processes

INVALID = ("INVALID_ARGUMENT", "INVALID_FIELD")
LAYOUT = layout_to_wire(whole({"a": ("float32", (4,)), "b": ("float32", (2,))}))
DIGESTS = {"a": f"{1:016x}", "b": f"{2:016x}"}


@dataclass
class World:
    """Refit, and the ledger behind it."""

    service: Service
    peer: Peer
    ledger: Peer
    run: Service

    def state(self) -> tuple[Any, dict[str, int]]:
        return self.ledger("GetRun"), sums(self.run.directory)


@pytest.fixture(scope="module")
def world(tmp_path_factory: Any) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("run")
    run = Service("experience", directory, experience_settings(directory, directory))
    refit = refit_beside(run)
    with serving(run) as ledger, serving(refit) as peer:
        begin(ledger)
        yield World(refit, peer, ledger, run)
        status, said = refit.stop()
        assert status == 0
        assert "Traceback" not in said


def rectangle(**changed: Any) -> pb.Layout:
    """A layout whose first rectangle says something else."""
    layout = pb.Layout()
    layout.CopyFrom(LAYOUT)
    for name, value in changed.items():
        target = layout.rectangles[0]
        target.ClearField(name)
        target.MergeFrom(pb.Rectangle(**{name: value}))
    return layout


OPEN = {"trainer_epoch": 1, "step": 0, "request_id": "r", "layout": LAYOUT}
SEND = {"trainer_epoch": 1, "version": 2, "digests": DIGESTS}
ATTEND = {"engine_id": "e1", "layout": LAYOUT}
EVERY = {"OpenVersion": OPEN, "SendVersion": SEND, "AwaitDemand": {}, "Attend": ATTEND}

ROWS = [
    ("G3-request", "OpenVersion", OPEN | {"request_id": ""}, "request_id"),
    ("G3-engine", "Attend", ATTEND | {"engine_id": ""}, "engine_id"),
    ("G3-layout", "OpenVersion", OPEN | {"layout": pb.Layout()}, "layout"),
    ("G4-slash", "OpenVersion", OPEN | {"request_id": "a/b"}, "request_id"),
    ("G4-dots", "Attend", ATTEND | {"engine_id": ".."}, "engine_id"),
    ("G4-nul", "Attend", ATTEND | {"engine_id": "a\0"}, "engine_id"),
    ("G4-newline", "Attend", ATTEND | {"engine_id": "a\n"}, "engine_id"),
    ("G4-star", "Attend", ATTEND | {"engine_id": "*"}, "engine_id"),
    ("G4-long", "Attend", ATTEND | {"engine_id": "e" * 129}, "engine_id"),
    ("G5-epoch", "OpenVersion", OPEN | {"trainer_epoch": 0}, "trainer_epoch"),
    ("G5-step", "OpenVersion", OPEN | {"step": -1}, "step"),
    ("G5-version", "SendVersion", SEND | {"version": 0}, "version"),
    ("G5-verified", "Attend", ATTEND | {"verified": -1}, "verified"),
    ("G5-serving", "Attend", ATTEND | {"serving": -1}, "serving"),
    ("G5-wait", "Attend", ATTEND | {"wait": duration(-1)}, "wait"),
    ("G5-published", "AwaitDemand", {"published_version": -1}, "published_version"),
    ("G11-dtype", "OpenVersion", OPEN | {"layout": rectangle(dtype="object")}, "a.dtype"),
    ("G11-shape", "OpenVersion", OPEN | {"layout": rectangle(shape=[-4])}, "a.stop"),
    ("G11-ranks", "OpenVersion", OPEN | {"layout": rectangle(start=[0, 0])}, "a.start"),
    ("G12", "OpenVersion", OPEN | {"layout": rectangle(stop=[2**60])}, "a.stop"),
    ("G12-shape", "Attend", ATTEND | {"layout": rectangle(shape=[2**60])}, "a.shape"),
    ("G18-served", "Attend", ATTEND | {"serving": 12}, "serving"),
    ("G25-digest", "SendVersion", SEND | {"digests": {"a": "1"}}, "digests[a]"),
    ("trace", "OpenVersion", OPEN | {"trace_id": "xyz"}, "trace_id"),
]


@pytest.mark.parametrize(
    ("method", "fields", "field"), [pytest.param(*row[1:], id=row[0]) for row in ROWS]
)
def test_a_field_outside_its_limits_is_refused_by_name(
    world: World, method: str, fields: dict[str, Any], field: str
) -> None:
    before = world.state()

    found = world.peer.refused(method, **fields)

    assert (found.code, found.reason, found.field) == (*INVALID, field)
    assert field in found.message
    assert ".py" not in found.message
    assert world.service.is_up
    assert world.state() == before
    assert not world.peer("AwaitDemand").wanted


@pytest.mark.parametrize(
    ("run_id", "reason"),
    [
        pytest.param("", "INVALID_FIELD", id="G3-none"),
        pytest.param("../x", "INVALID_FIELD", id="G4-path"),
        pytest.param("other", "WRONG_RUN", id="other"),
    ],
)
@pytest.mark.parametrize("method", EVERY)
def test_a_call_for_another_run_is_refused(
    world: World, method: str, run_id: str, reason: str
) -> None:
    before = world.state()

    found = world.peer.refused(method, **EVERY[method], run_id=run_id)

    assert (found.reason, found.field) == (reason, "run_id")
    assert world.state() == before


def test_every_method_of_the_contract_is_in_the_catalogue(world: World) -> None:
    assert sorted(EVERY) == sorted(world.peer.methods)


STATES = [
    ("G21", "OpenVersion", OPEN | {"trainer_epoch": 7}, "TRAINER_FENCED"),
    ("G18-send", "SendVersion", SEND | {"version": 12}, "VERSION_ENDED"),
]


@pytest.mark.parametrize(
    ("method", "fields", "reason"), [pytest.param(*row[1:], id=row[0]) for row in STATES]
)
def test_what_the_state_does_not_allow_is_refused_with_its_reason(
    world: World, method: str, fields: dict[str, Any], reason: str
) -> None:
    before = world.state()

    found = world.peer.refused(method, **fields)

    assert (found.code, found.reason) == ("FAILED_PRECONDITION", reason)
    assert world.state() == before


def test_g1_a_message_beyond_the_limit_is_refused_whole(world: World) -> None:
    request = world.peer.request("Attend", **ATTEND, failure="x" * (MESSAGE_LIMIT + 1))

    found = world.peer.tried("Attend", request, timeout=30)

    assert found is not None
    assert found.code == "RESOURCE_EXHAUSTED"
    assert str(MESSAGE_LIMIT) in found.message
    assert not world.peer("AwaitDemand").wanted


def test_g29_bytes_that_are_no_message_are_refused(world: World) -> None:
    found = world.peer.tried("Attend", b"\x0a\x02\xff\xfe")

    assert found is not None
    assert (found.code, found.reason, found.field) == (*INVALID, "request")
