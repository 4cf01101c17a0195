import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle_agents.chat_agent import ChatContext
from treadle_agents.failures import EpisodeError
from treadle_core.tickets import Sampling
from treadle_rollout.frames import (
    MAX_FRAME,
    AgentKind,
    FrameError,
    Say,
    Unpacker,
    context_from_json,
    context_to_json,
    failure_of,
    ids_of,
    kind_of,
    outcome_of,
    pack,
)


@given(st.lists(st.tuples(st.sampled_from(Say), st.binary(max_size=40))), st.data())
def test_frames_survive_however_the_stream_is_cut(frames: list, data: st.DataObject) -> None:
    stream = b"".join(pack(say, raw) for say, raw in frames)
    unpacker, found = Unpacker(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += unpacker.feed(stream[:size])
        stream = stream[size:]
    assert found == [(say, [raw]) for say, raw in frames]


@given(st.binary(max_size=60))
def test_whatever_a_worker_sends_is_frames_or_a_frame_error(data: bytes) -> None:
    framed = len(data).to_bytes(4, "little") + data
    for stream in (data, framed):
        try:
            for say, fields in Unpacker().feed(stream):
                assert isinstance(say, Say)
                assert isinstance(fields, list)
        except FrameError:
            pass


def test_a_frame_that_claims_too_much_is_refused_before_it_is_read() -> None:
    with pytest.raises(FrameError, match=f"at most {MAX_FRAME} bytes, got {MAX_FRAME + 1}"):
        list(Unpacker().feed((MAX_FRAME + 1).to_bytes(4, "little")))


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.lists(JUNK, max_size=5))
def test_whatever_a_worker_reports_is_an_outcome_or_a_failure_of_its_episode(fields: list) -> None:
    fields = msgpack.unpackb(msgpack.packb(fields), strict_map_key=False)
    assert isinstance(failure_of(fields), EpisodeError)
    for read in (ids_of, outcome_of):
        with contextlib.suppress(EpisodeError):
            read(fields)


@given(st.lists(JUNK, max_size=3))
def test_whatever_says_that_it_is_ready_states_a_kind_or_is_refused(fields: list) -> None:
    with contextlib.suppress(FrameError):
        assert kind_of(fields) in set(AgentKind)
    assert kind_of(["chat"]) is AgentKind.CHAT


def test_a_context_goes_to_a_worker_whole() -> None:
    sampling = Sampling(0.5, 7, logit_bias={3: 1.5}, schema={"type": "object"})
    context = ChatContext({"a": [1, None]}, "b/v1", "b", "key", "policy", sampling, 99, 1.5)
    assert context_from_json(context_to_json(context)) == context


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e7, "x", None])
def test_numbers_of_a_worker_are_checked_again(number: object) -> None:
    for fields in (
        [number, "finished", {}, []],
        [1.0, "finished", {"a": number}, []],
        [1.0, "finished", {}, [number]],
    ):
        if fields[0] is None:  # an absent reward is no wrong one
            continue
        with pytest.raises(EpisodeError, match="an outcome"):
            outcome_of(fields)
