"""What broken replicas say of an episode: each result is refused by field, and changes nothing."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from badinput_harness import World, attempt, completion, result, segment

from treadle.episode.v1 import episode_pb2
from treadle.experience.v1 import experience_service_pb2 as pb
from treadle_core.ids import episode_id
from treadle_core.media import Medium
from treadle_payloads.codec import encode_payload
from treadle_payloads.files import FileStore
from treadle_payloads.media import medium_to_wire

pytestmark = pytest.mark.processes

INVALID = ("INVALID_ARGUMENT", "INVALID_FIELD")
NAN, INF = math.nan, math.inf


def payload(change: Callable[[Any], None]) -> Any:
    """A result whose payload's only segment was changed, under the right sha256."""
    message = episode_pb2.EpisodePayload.FromString(encode_payload([segment()]))
    change(message.segments[0])
    return result(message.SerializeToString())


def array(name: str, **changed: Any) -> Any:
    """A result in whose payload one array says something else."""

    def change(message: Any) -> None:
        target = getattr(message, name)
        for key, value in changed.items():
            target.ClearField(key)
            target.MergeFrom(episode_pb2.Array(**{key: value}))

    return payload(change)


def spans(name: str, *lengths: int) -> Any:
    def change(message: Any) -> None:
        message.ClearField(name)
        getattr(message, name).extend(episode_pb2.VersionSpan(version=1, length=n) for n in lengths)

    return payload(change)


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def of_version(number: int) -> Any:
    return result(encode_payload([segment(version=number)]), versions=[number])


CAT, DOG = Medium.of(b"cat", "image/png"), Medium.of(b"dog", "image/png")


def media(*said: Any, spans: Any = ((CAT.sha256, 0, 1),), **changed: Any) -> Any:
    """A result whose payload shows media at `spans`, and which names those `said`, or CAT.

    Of the first that it names a field is `changed`.
    """

    def change(message: Any) -> None:
        fields = ("sha256", "start", "length")
        message.media.extend(
            episode_pb2.MediumSpan(**dict(zip(fields, span, strict=True))) for span in spans
        )

    made = payload(change)
    made.media.extend(map(medium_to_wire, said or (CAT,)))
    for name, value in changed.items():
        setattr(made.media[0], name, value)
    return made


RESULTS = [
    ("G5-tokens", result(num_tokens=0), "result.num_tokens"),
    ("G5-trained", result(num_trained=-1), "result.num_trained"),
    ("G6-mask", array("sampled", shape=[3], data=b"\0\0\1"), "segments[0].sampled"),
    ("G6-logprobs", array("logprobs", shape=[3], data=floats(0, 0, -1)), "segments[0].logprobs"),
    ("G6-versions", spans("policy_version", 3), "segments[0].policy_version"),
    ("G6-context", spans("context_version", 5), "segments[0].context_version"),
    ("G6-total", result(num_tokens=5), "result.num_tokens"),
    ("G6-trained", result(num_trained=1), "result.num_trained"),
    ("G6-other-versions", result(versions=[1, 2]), "result.versions"),
    ("G8-nan", result(reward=NAN), "result.reward"),
    ("G8-inf", result(reward=-INF), "result.reward"),
    ("G8-large", result(reward=1.1e6), "result.reward"),
    ("G8-turn", result(turn_rewards=[0.0, NAN]), "result.turn_rewards[1]"),
    ("G8-metric", result(metrics={"calls": INF}), "result.metrics.calls"),
    ("G9-nan", array("logprobs", data=floats(0, 0, NAN, -1)), "segments[0].logprobs"),
    ("G9-inf", array("logprobs", data=floats(0, 0, -INF, -1)), "segments[0].logprobs"),
    ("G9-positive", array("logprobs", data=floats(0, 0, 0.01, -1)), "segments[0].logprobs"),
    ("G10", array("token_ids", data=ints(0, 1, -2, 3)), "segments[0].token_ids"),
    ("G11-dtype", array("logprobs", dtype="bfloat16"), "segments[0].logprobs.dtype"),
    ("G11-other", array("logprobs", dtype="int32"), "segments[0].logprobs.dtype"),
    ("G11-bytes", array("logprobs", data=floats(0, 0)), "segments[0].logprobs"),
    ("G11-overflow", array("token_ids", shape=[2**32, 2**32]), "segments[0].token_ids.shape"),
    ("G11-negative", array("token_ids", shape=[-4]), "segments[0].token_ids.shape"),
    ("G12", array("token_ids", shape=[2**60]), "segments[0].token_ids"),
    ("G12-spans", spans("policy_version", 2**60), "segments[0].policy_version"),
    ("G13-pickle", result(b"\x80\x04\x95\x0c\0\0\0\0\0\0\0\x8c\x02os"), "payload"),
    ("G13-npy", result(b"\x93NUMPY\x01\0v\0{'descr': '|O'}"), "payload"),
    ("G13-object", array("token_ids", dtype="|O"), "segments[0].token_ids.dtype"),
    ("G14-unset", result(termination=0), "result.termination"),
    ("G14-unknown", result(termination=99), "result.termination"),
    ("G31-sha256", media(sha256="../../../etc/passwd"), "result.media[0].sha256"),
    ("G31-empty", media(size=0), "result.media[0].size"),
    ("G31-size", media(size=-1), "result.media[0].size"),
    ("G31-huge", media(size=2**62), "result.media[0].size"),
    ("G31-type", media(media_type="text/html"), "result.media[0].media_type"),
    ("G31-long", media(media_type="image/" + "x" * 10_000), "result.media[0].media_type"),
    ("G31-node", media(node="http://elsewhere/"), "result.media[0].node"),
    ("G31-epoch", media(epoch=-1), "result.media[0].epoch"),
    ("G31-twice", media(CAT, CAT), "result.media[1].sha256"),
    ("G31-many", media(*[CAT] * 257), "result.media"),
    ("G32-sha256", media(spans=[("cat", 0, 1)]), "segments[0].media[0].sha256"),
    ("G32-start", media(spans=[(CAT.sha256, -1, 1)]), "segments[0].media[0].start"),
    ("G32-length", media(spans=[(CAT.sha256, 0, 0)]), "segments[0].media[0].length"),
    ("G32-beyond", media(spans=[(CAT.sha256, 1, 2**62)]), "segments[0].media[0].length"),
    ("G32-sampled", media(spans=[(CAT.sha256, 1, 2)]), "segments[0].media[0]"),
    ("G32-overlap", media(spans=[(CAT.sha256, 0, 2)] * 2), "segments[0].media[1].start"),
    ("G32-many", media(spans=[(CAT.sha256, 0, 1)] * 99), "segments[0].media"),
    ("G32-unknown", media(DOG, spans=[(CAT.sha256, 0, 1)]), "result.media[0].sha256"),
    (
        "G32-unnamed",
        media(DOG, spans=[(CAT.sha256, 0, 1), (DOG.sha256, 1, 1)]),
        "segments[0].media[0].sha256",
    ),
    ("G32-unshown", media(CAT, DOG), "result.media[1].sha256"),
    ("G32-none", media(spans=()), "result.media[0].sha256"),
    ("G27", result(metrics={str(i): 0.0 for i in range(5000)}), "result.metrics"),
]


@pytest.mark.parametrize(("bad", "field"), [pytest.param(*row[1:], id=row[0]) for row in RESULTS])
def test_a_result_that_cannot_be_is_refused_by_field(world: World, bad: Any, field: str) -> None:
    ticket = world.ticket()
    before = world.ledger()

    found = world.peer.refused("CompleteEpisode", **completion(ticket, bad))

    assert (found.code, found.reason) == INVALID
    assert found.field == field
    assert field in found.message
    world.holds_after(before, ticket)


def test_a_result_without_a_trained_token_is_taken_and_counted(world: World) -> None:
    """G7: an explicit policy; the ledger keeps `num_trained`, and such a result weighs nothing."""
    one = segment()
    one.trained[:] = False

    answer = world.peer(
        "CompleteEpisode",
        **completion(world.ticket(), result(encode_payload([one]), num_trained=0)),
    )

    assert not answer.duplicate


def test_g18_a_token_of_an_unregistered_version_is_refused(world: World) -> None:
    ticket = world.ticket()
    before = world.ledger()

    found = world.peer.refused("CompleteEpisode", **completion(ticket, of_version(12)))

    assert (found.code, found.reason) == ("FAILED_PRECONDITION", "UNKNOWN_VERSION")
    assert "version 12 is not registered" in found.message
    world.holds_after(before, ticket)


def test_g20_the_same_result_is_a_duplicate_and_another_a_conflict(world: World) -> None:
    ticket = world.ticket()
    world.peer("CompleteEpisode", **completion(ticket))
    before = world.ledger()
    other = result(encode_payload([segment(6)]), num_tokens=6, num_trained=3)

    again = world.peer("CompleteEpisode", **completion(ticket))
    found = world.peer.refused("CompleteEpisode", **completion(ticket, other))

    assert again.duplicate
    assert (found.code, found.reason) == ("ALREADY_EXISTS", "RESULT_CONFLICT")
    assert "sha256" in found.field
    assert world.ledger() == before


def test_g21_a_result_of_an_older_attempt_is_fenced(world: World) -> None:
    ticket = world.ticket()
    world.peer("FailEpisode", replica_id="r1", attempt=attempt(ticket), failure_class=3)
    again = world.ticket()
    before = world.ledger()

    found = world.peer.refused("CompleteEpisode", **completion(ticket))

    assert (again.episode_id, again.attempt) == (ticket.episode_id, 2)
    assert (found.code, found.reason) == ("FAILED_PRECONDITION", "STALE_ATTEMPT")
    world.holds_after(before, again)


def test_g22_an_episode_beyond_its_group_was_never_issued(world: World) -> None:
    ticket = world.ticket()
    beyond = episode_id("run", ticket.task_id, world.service.settings["group_size"])
    before = world.ledger()
    fields = completion(ticket) | {"attempt": pb.Attempt(episode_id=beyond, attempt=1)}

    found = world.peer.refused("CompleteEpisode", **fields)

    assert (found.code, found.reason) == ("NOT_FOUND", "UNKNOWN_EPISODE")
    world.holds_after(before, ticket)


def test_g25_bytes_that_differ_from_their_digest_are_data_loss(world: World) -> None:
    ticket = world.ticket()
    before = world.ledger()
    torn = result()
    torn.payload.inline = torn.payload.inline[:-1] + b"\x7f"

    found = world.peer.refused("CompleteEpisode", **completion(ticket, torn))

    assert (found.code, found.reason) == ("DATA_LOSS", "PAYLOAD_CORRUPT")
    world.holds_after(before, ticket)


def test_g25_a_payload_that_the_store_does_not_hold_is_asked_for(world: World) -> None:
    ticket = world.ticket()
    before = world.ledger()
    absent = result()
    absent.payload.ClearField("inline")

    found = world.peer.refused("CompleteEpisode", **completion(ticket, absent))

    assert (found.code, found.reason) == ("NOT_FOUND", "PAYLOAD_MISSING")
    world.holds_after(before, ticket)


def test_g33_a_medium_that_the_store_does_not_hold_is_asked_for(world: World) -> None:
    ticket = world.ticket()
    before = world.ledger()

    found = world.peer.refused("CompleteEpisode", **completion(ticket, media()))

    assert (found.code, found.reason) == ("NOT_FOUND", "PAYLOAD_MISSING")
    assert found.field == "result.media[0].sha256"
    world.holds_after(before, ticket)


def test_g33_bytes_of_another_size_are_not_the_medium(world: World) -> None:
    store = FileStore(run_dir=world.service.directory)
    store.path(CAT.sha256).write_bytes(b"cats")
    ticket = world.ticket()
    before = world.ledger()

    found = world.peer.refused("CompleteEpisode", **completion(ticket, media()))
    store.delete(CAT.sha256)
    store.put(b"cat")
    taken = world.peer("CompleteEpisode", **completion(ticket, media()))

    assert (found.code, found.reason) == ("NOT_FOUND", "PAYLOAD_MISSING")
    assert found.field == "result.media[0].sha256"
    assert not taken.duplicate
    assert world.ledger() != before
