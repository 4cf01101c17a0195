"""A payload sidecar and the experience service, as processes: what broken peers send, and what a
crash between the two leaves.

The ids are those of the bad-input catalogue.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from badinput_harness import (
    PATIENCE_S,
    RUN,
    Peer,
    Service,
    attempt,
    begin,
    experience_settings,
    lease,
    refusal,
    result,
    segment,
    serving,
    sums,
    until,
)
from sidecar_process import Sidecar, running

from treadle.episode.v1 import episode_pb2
from treadle.payload.v1 import payload_service_pb2 as pb
from treadle_core.media import Medium, MediumSpan
from treadle_payloads.codec import encode_payload
from treadle_payloads.media import medium_to_wire, put_medium
from treadle_payloads.servicer import CHUNK_BYTES, READERS
from treadle_payloads.sidecar_store import SidecarStore
from treadle_payloads.store import Hold, PayloadReference

pytestmark = pytest.mark.processes

INVALID = ("INVALID_ARGUMENT", "INVALID_FIELD")
HOLD = {"sha256": "0" * 64, "holder": "e1"}
CONFIRM = {"writer_epoch": 1, "size": 1, **HOLD}
NEED = {"size": 1, **HOLD}
NEEDS = {"writer_epoch": 1, "needs": [NEED]}
RELEASE = {"writer_epoch": 1, "holds": [HOLD]}
READ = {"sha256": "0" * 64}


def released(**changed: str) -> dict[str, Any]:
    return RELEASE | {"holds": [HOLD | changed]}


def needed(**changed: Any) -> dict[str, Any]:
    return NEEDS | {"needs": [NEED | changed]}


@dataclass
class Plane:
    """A run whose payloads lie with a sidecar."""

    run: Service
    experience: Peer
    sidecar: Sidecar
    payload: Peer
    store: SidecarStore

    def stored(self, ticket: Any, segments: int, image: bytes = b"") -> Any:
        """The result of an episode whose payload was uploaded; another one for each number.

        Its segments show the image, if there is one, and that is uploaded too.
        """
        media = [Medium.of(image, "image/png")] if image else []
        spans = tuple(MediumSpan(medium.sha256, 0, 2) for medium in media)
        data = encode_payload([replace(segment(), media=spans)] * segments)
        put = self.store.put(data, holder=ticket.episode_id)
        payload = episode_pb2.Payload(
            sha256=put.sha256, size=put.size, node=put.node, epoch=put.epoch
        )
        made = result(data, payload=payload, num_tokens=4 * segments, num_trained=2 * segments)
        for medium in media:
            placed = put_medium(medium, image, self.store, holder=ticket.episode_id)
            made.media.append(medium_to_wire(placed))
        return made

    def completed(self, ticket: Any, of: Any) -> PayloadReference:
        fields = {"replica_id": "r1", "attempt": attempt(ticket), "result": of}
        self.experience("CompleteEpisode", **fields)
        payload = of.payload
        return PayloadReference(payload.sha256, payload.size, payload.node, payload.epoch)

    def failed(self, ticket: Any) -> None:
        fields = {"replica_id": "r1", "attempt": attempt(ticket), "failure_class": 2}
        self.experience("FailEpisode", **fields)

    def read(self, channel: grpc.Channel | None = None, **fields: Any) -> Any:
        request = pb.ReadRequest(**{"run_id": RUN} | READ | fields)
        call = (channel or self.payload._channel).unary_stream(
            "/treadle.payload.v1.PayloadService/Read",
            response_deserializer=pb.ReadResponse.FromString,
        )
        return call(request.SerializeToString(), timeout=PATIENCE_S, wait_for_ready=True)

    def refused_read(self, **fields: Any) -> Any:
        with pytest.raises(grpc.RpcError) as raised:
            list(self.read(**fields))
        return refusal(raised.value)

    def has(self, reference: PayloadReference) -> bool:
        return any(path.name == reference.sha256 for path in self.sidecar.files())


@contextlib.contextmanager
def plane_in(directory: Path, *, pin_s: float = 600.0, **changed: Any) -> Iterator[Plane]:
    sidecar = Sidecar(directory)
    settings = experience_settings(directory, directory, **changed)
    plugin = {"name": "sidecar", "upload": str(sidecar.upload), "node": sidecar.node}
    settings["run"] |= {"payloads": plugin}
    run = Service("experience", directory, settings, log=directory / "experience.log")
    with (
        running(directory, experience_address=settings["listen"], pin_s=pin_s) as sidecar,
        serving(run) as experience,
        contextlib.closing(Peer("payload", sidecar.node)) as payload,
    ):
        begin(experience)
        yield Plane(run, experience, sidecar, payload, sidecar.store())
        assert "Traceback" not in (directory / "log").read_text()
        assert "Traceback" not in (directory / "experience.log").read_text()


@pytest.fixture(scope="module")
def plane(tmp_path_factory: Any) -> Iterator[Plane]:
    with plane_in(tmp_path_factory.mktemp("run")) as made:
        yield made


def holds_after(plane: Plane) -> None:
    """Both processes are up, and the sidecar serves."""
    assert plane.run.is_up
    reference = plane.store.put(os.urandom(100), holder="e1")
    chunks = [part.chunk for part in plane.read(sha256=reference.sha256)]
    assert b"".join(chunks) == plane.store.get(reference)


@pytest.mark.parametrize(
    ("method", "fields", "field"),
    [
        pytest.param("Confirm", CONFIRM | {"run_id": ""}, "run_id", id="G3-confirm"),
        pytest.param("Release", RELEASE | {"run_id": ""}, "run_id", id="G3-release"),
        pytest.param("Confirm", CONFIRM | {"holder": ""}, "holder", id="G3-holder"),
        pytest.param("Confirm", CONFIRM | {"sha256": ""}, "sha256", id="G3-key"),
        pytest.param("Confirm", CONFIRM | {"sha256": "../" * 21 + "x"}, "sha256", id="G4-path"),
        pytest.param("Confirm", CONFIRM | {"holder": "a/b"}, "holder", id="G4-holder"),
        pytest.param("Release", released(holder="*"), "holds[0].holder", id="G4-hold"),
        pytest.param("Release", released(sha256="x\n"), "sha256", id="G4-line"),
        pytest.param("Confirm", CONFIRM | {"size": -1}, "size", id="G5-size"),
        pytest.param("Confirm", CONFIRM | {"writer_epoch": 0}, "writer_epoch", id="G5-writer"),
        pytest.param("Release", RELEASE | {"writer_epoch": -5}, "writer_epoch", id="G5-writer-2"),
        pytest.param("Release", RELEASE | {"holds": [HOLD] * 65537}, "holds", id="G5-holds"),
        pytest.param("ConfirmAll", NEEDS | {"run_id": ""}, "run_id", id="G3-all"),
        pytest.param("ConfirmAll", needed(holder=""), "needs[0].holder", id="G3-all-holder"),
        pytest.param("ConfirmAll", needed(sha256="../x"), "sha256", id="G4-all-path"),
        pytest.param("ConfirmAll", needed(size=-1), "needs[0].size", id="G5-all-size"),
        pytest.param("ConfirmAll", NEEDS | {"writer_epoch": 0}, "writer_epoch", id="G5-all-writer"),
        pytest.param("ConfirmAll", NEEDS | {"needs": [NEED] * 65537}, "needs", id="G5-all-needs"),
    ],
)
def test_a_field_outside_its_limits_is_refused_by_name(
    plane: Plane, method: str, fields: dict[str, Any], field: str
) -> None:
    found = plane.payload.refused(method, **fields)

    assert (found.code, found.reason) == INVALID
    assert found.field == field
    assert field in found.message
    assert ".py" not in found.message
    holds_after(plane)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        pytest.param({"run_id": ""}, "run_id", id="G3-read"),
        pytest.param({"sha256": ""}, "sha256", id="G3-read-key"),
        pytest.param({"sha256": "../" * 21 + "x"}, "sha256", id="G4-read-path"),
        pytest.param({"sha256": "a\0" * 32}, "sha256", id="G4-read-nul"),
        pytest.param({"offset": -1}, "offset", id="G5-read-offset"),
    ],
)
def test_a_bad_read_is_refused_by_name(plane: Plane, fields: dict[str, Any], field: str) -> None:
    found = plane.refused_read(**fields)

    assert (found.code, found.reason, found.field) == (*INVALID, field)
    holds_after(plane)


def test_g5_a_read_beyond_the_end_is_refused(plane: Plane) -> None:
    reference = plane.store.put(b"tokens", holder="e1")

    assert [part.chunk for part in plane.read(sha256=reference.sha256, offset=6)] == [b""]
    found = plane.refused_read(sha256=reference.sha256, offset=7)

    assert (found.code, found.field) == ("INVALID_ARGUMENT", "offset")


def test_what_is_not_there_is_missing(plane: Plane) -> None:
    read, confirmed = plane.refused_read(), plane.payload.refused("Confirm", **CONFIRM)

    assert (read.code, read.reason) == ("NOT_FOUND", "PAYLOAD_MISSING")
    assert (confirmed.code, confirmed.reason) == ("NOT_FOUND", "PAYLOAD_MISSING")
    assert list(plane.payload("ConfirmAll", **NEEDS).missing) == [0]


def test_calls_for_another_run_are_refused(plane: Plane) -> None:
    refused = [
        plane.payload.refused("Confirm", **CONFIRM | {"run_id": "other"}),
        plane.payload.refused("ConfirmAll", **NEEDS | {"run_id": "other"}),
        plane.payload.refused("Release", **RELEASE | {"run_id": "other"}),
        plane.refused_read(run_id="other"),
    ]

    assert {(each.code, each.reason) for each in refused} == {("FAILED_PRECONDITION", "WRONG_RUN")}


def test_g1_a_stream_comes_in_chunks_below_every_limit(plane: Plane) -> None:
    data = os.urandom(3 * CHUNK_BYTES + 5)
    reference = plane.store.put(data, holder="e1")

    parts = list(plane.read(sha256=reference.sha256))

    assert [len(part.chunk) for part in parts] == [*([CHUNK_BYTES] * 3), 5]
    assert b"".join(part.chunk for part in parts) == data
    assert {(part.size, part.epoch) for part in parts} == {(len(data), 1)}
    (rest,) = plane.read(sha256=reference.sha256, offset=len(data) - 5)
    assert rest.chunk == data[-5:]


def test_g24_readers_that_leave_and_g30_too_many_of_them_cost_nothing(plane: Plane) -> None:
    reference = plane.store.put(os.urandom(8 * CHUNK_BYTES), holder="e1")
    # A window that stays small: what nobody reads stays in the sidecar, and its streams open.
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.default_authority", "localhost")]
    with grpc.insecure_channel(
        plane.sidecar.node, options=[*narrow, ("grpc.max_receive_message_length", -1)]
    ) as channel:
        streams = [plane.read(channel, sha256=reference.sha256) for _ in range(READERS)]
        for stream in streams:
            next(stream)

        found = plane.refused_read(sha256=reference.sha256)
        for stream in streams:
            stream.cancel()

    assert (found.code, found.reason) == ("RESOURCE_EXHAUSTED", "TOO_MANY_READERS")
    assert found.retry_after_s

    def served() -> bool:
        try:
            return len(list(plane.read(sha256=reference.sha256))) == 8
        except grpc.RpcError:
            return False

    until(served)
    assert plane.sidecar.process is not None
    open_files = Path(f"/proc/{plane.sidecar.process.pid}/fd").iterdir()
    assert len(list(open_files)) < READERS


def test_bytes_that_are_no_message_are_refused(plane: Plane) -> None:
    found = plane.payload.tried("Confirm", b"\x80\x04\x95pickle")

    assert found is not None
    assert (found.code, found.reason, found.field) == (*INVALID, "request")
    holds_after(plane)


@pytest.mark.parametrize(
    "node", ["unix:relative", "http://host:1/", "host", "a b:1", "host:123456", "x" * 300 + ":1"]
)
def test_g4_a_result_names_a_node_that_can_be_one(plane: Plane, node: str) -> None:
    (ticket,) = lease(plane.experience)
    wrong = plane.stored(ticket, 1)
    wrong.payload.node = node

    found = plane.experience.refused(
        "CompleteEpisode", replica_id="r1", attempt=attempt(ticket), result=wrong
    )

    assert (found.code, found.field) == ("INVALID_ARGUMENT", "result.payload.node")


def test_a_result_whose_payload_is_not_on_its_node_is_asked_for(plane: Plane) -> None:
    (ticket,) = lease(plane.experience)
    of = plane.stored(ticket, 2)
    reference = PayloadReference(of.payload.sha256, of.payload.size, of.payload.node)
    plane.store.release([Hold(reference, ticket.episode_id)], writer_epoch=1)

    found = plane.experience.refused(
        "CompleteEpisode", replica_id="r1", attempt=attempt(ticket), result=of
    )

    assert (found.code, found.reason) == ("NOT_FOUND", "PAYLOAD_MISSING")
    assert found.field == "result.payload.sha256"


def test_a_result_whose_node_is_away_is_told_to_come_again(plane: Plane) -> None:
    (ticket,) = lease(plane.experience)
    of = plane.stored(ticket, 1)
    of.payload.node = f"unix:{plane.sidecar.directory}/nobody"

    found = plane.experience.refused(
        "CompleteEpisode", replica_id="r1", attempt=attempt(ticket), result=of
    )

    assert (found.code, found.reason) == ("UNAVAILABLE", "PAYLOAD_STORE_AWAY")


ONE_EACH = {"group_size": 2, "retries": 0}


def test_released_payloads_go_and_shared_ones_stay_with_the_last(tmp_path: Path) -> None:
    with plane_in(tmp_path, **ONE_EACH) as plane:
        one, other, third, fourth = lease(plane.experience, max_tickets=4)
        assert one.task_id == other.task_id != third.task_id
        own, shared = plane.stored(one, 1), plane.stored(third, 2)
        gone = plane.completed(one, own)
        stays = plane.completed(third, shared)
        plane.stored(fourth, 2)  # the same bytes as the third: pinned

        plane.failed(other)  # the group of the first is incomplete, and leaves
        until(lambda: not plane.has(gone))
        plane.failed(fourth)
        assert plane.has(stays)  # an attempt pins it still


def test_an_image_that_many_show_is_one_object_and_goes_with_the_last_of_them(
    tmp_path: Path,
) -> None:
    with plane_in(tmp_path, **ONE_EACH) as plane:
        one, other, third, fourth = lease(plane.experience, max_tickets=4)
        image = PayloadReference.of(b"a picture")
        gone = plane.completed(one, plane.stored(one, 1, b"a picture"))
        plane.completed(third, plane.stored(third, 2, b"a picture"))
        names = [path.name for path in plane.sidecar.files()]
        assert names.count(image.sha256) == 1
        assert sums(tmp_path)["media"] == 1

        plane.failed(other)  # the group of the first is incomplete, and leaves
        until(lambda: not plane.has(gone))
        assert plane.has(image)
        plane.failed(fourth)
        until(lambda: not plane.has(image))
        assert sums(tmp_path)["pending"] == 0


def test_a_result_whose_medium_is_not_on_its_node_is_asked_for(plane: Plane) -> None:
    (ticket,) = lease(plane.experience)
    of = plane.stored(ticket, 1, b"not a picture for long")
    medium = of.media[0]
    hold = Hold(PayloadReference(medium.sha256, medium.size, medium.node), ticket.episode_id)
    plane.store.release([hold], writer_epoch=1)

    found = plane.experience.refused(
        "CompleteEpisode", replica_id="r1", attempt=attempt(ticket), result=of
    )

    assert (found.code, found.reason) == ("NOT_FOUND", "PAYLOAD_MISSING")
    assert found.field == "result.media[0].sha256"


def test_what_a_crash_between_a_release_and_its_deletion_leaves_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plane_in(tmp_path, pin_s=1.0, **ONE_EACH) as plane:
        one, other, third, _ = lease(plane.experience, max_tickets=4)
        left = plane.completed(one, plane.stored(one, 1))
        needed = plane.completed(third, plane.stored(third, 2))
        never_told = plane.store.put(os.urandom(1000), holder="e1")
        plane.run.kill()
        plane.sidecar.signal(signal.SIGSTOP)  # nothing is swept before all is as it is to be
        monkeypatch.setenv("TREADLE_FAILPOINTS", "experience.release.before_delete=exit:9")
        process = plane.run.start()
        monkeypatch.delenv("TREADLE_FAILPOINTS")
        plane.failed(other)  # the group of the first is incomplete, and leaves
        assert process.wait(PATIENCE_S) == 9
        plane.sidecar.signal(signal.SIGCONT)
        assert plane.has(left)

        plane.run.start()

        until(lambda: not plane.has(left) and not plane.has(never_told))
        assert plane.has(needed)
        sums(tmp_path)
