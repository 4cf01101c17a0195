import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle_agents.chat_agent import ChatContext
from treadle_agents.failures import EpisodeError
from treadle_core.tickets import Sampling
from treadle_rollout.frames import (
    FRAMING,
    AgentKind,
    Say,
    context_from_json,
    context_to_json,
    failure_of,
    kind_of,
    outcome_of,
    shown_of,
)
from treadle_runtime.workers.framing import FrameError

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
    ((_, fields),) = FRAMING.unpacker().feed(FRAMING.pack(Say.ENDED, *fields))
    assert isinstance(failure_of(fields), EpisodeError)
    for read in (shown_of, outcome_of):
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
