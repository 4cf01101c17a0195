"""Requests that come again, and turns that do not end well."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest

from treadle_agents.record import Generated
from treadle_core.errors import InvalidFieldError
from treadle_gateway.conversation import Ask, Tool, ToolChoice, Usage, Wanted


def test_a_whole_reply_that_did_not_arrive_is_replayed(talk):
    turn = talk.say([talk.user("hi")], talk.assistant("hello"), deliver=False)
    reply = turn.reply
    place = talk.locate(talk.user("hi"))
    assert (place.kind, place.turn) == ("replay", turn)
    assert place.turn.reply is reply
    place.turn.delivered()
    assert talk.capture.counts["replayed"] == 1
    assert [s.num_trained for s in talk.capture.segments(trainable=True)] == [3]


def test_a_reply_that_arrived_is_sampled_anew_beside_the_former(talk):
    turns = [talk.say([talk.user("hi")], talk.assistant("")) for _ in range(3)]
    assert [turn.base for turn in turns] == [None] * 3
    segments = talk.capture.segments(trainable=True)
    assert [segment.num_trained for segment in segments] == [3, 3, 3]
    assert talk.capture.counts["branches"] == 2


@pytest.mark.parametrize("tools", [(), (Tool("look", "", {}),)], ids=["same", "other-tools"])
def test_a_reply_that_comes_back_did_arrive(talk, tools):
    turn = talk.say([talk.user("hi")], talk.assistant("hello"), deliver=False)
    talk.locate(talk.user("hi"), talk.assistant("hello"), talk.user("more"), tools=tools)
    assert turn.state == "delivered"
    assert turn.reply is None
    turn.delivered()
    assert talk.locate(talk.user("hi")).kind == "sample"


def test_an_identical_request_joins_a_running_turn(talk):
    turn = talk.start(talk.user("hi"))
    talk.hear(turn, 2)
    place = talk.locate(talk.user("hi"))
    assert (place.kind, place.turn) == ("join", turn)
    other = talk.locate(talk.user("ho"))
    assert (other.kind, other.turn) == ("sample", None)
    assert talk.capture.counts["joined"] == 1
    assert talk.capture.counts["turns"] == 1


ASK = Ask("policy", ())


@pytest.mark.parametrize(
    ("other", "same"),
    [
        pytest.param(replace(ASK, stream=True), True, id="stream"),
        pytest.param(replace(ASK, max_tokens=9), True, id="max_tokens"),
        pytest.param(replace(ASK, logprobs=True, usage_in_stream=False), True, id="shown"),
        pytest.param(replace(ASK, identity={"thread": "2"}), True, id="identity"),
        pytest.param(replace(ASK, ignored=("user",)), True, id="ignored"),
        pytest.param(replace(ASK, wanted=Wanted(temperature=0.5)), False, id="temperature"),
        pytest.param(replace(ASK, wanted=Wanted(stop=("#",))), False, id="stop"),
        pytest.param(replace(ASK, wanted=Wanted(schema={})), False, id="schema"),
        pytest.param(replace(ASK, wanted=Wanted(logit_bias={7: 1.0})), False, id="logit_bias"),
        pytest.param(replace(ASK, choice=ToolChoice("required")), False, id="choice"),
        pytest.param(replace(ASK, reasoning=False), False, id="reasoning"),
    ],
)
def test_a_request_is_the_same_if_what_is_sampled_is(talk, other, same):
    turn = talk.start(talk.user("hi"))
    place = talk.capture.locate(replace(other, messages=(talk.user("hi"),)))
    assert (place.turn is turn) == same


def test_biases_are_the_same_in_any_order(talk):
    wanted = Wanted(logit_bias={7: 1.0, 10: 2.0})
    place = talk.capture.locate(replace(ASK, wanted=wanted, messages=(talk.user("hi"),)))
    again = replace(ASK, wanted=Wanted(logit_bias={10: 2.0, 7: 1.0}), messages=(talk.user("hi"),))
    assert talk.capture.locate(again).wanted == place.wanted


def test_a_turn_that_was_cut_is_sampled_anew_and_its_part_kept_untrained(talk):
    cut = talk.start(talk.user("hi"))
    talk.hear(cut, 2)
    cut.cut("failed: the engine went down")
    whole = talk.say([talk.user("hi")], talk.assistant("hello"))
    segments = talk.capture.segments(trainable=True)
    assert [(s.sampled.sum(), s.num_trained) for s in segments] == [(2, 0), (3, 3)]
    assert whole.label == cut.label == "main"
    assert talk.capture.counts["untrained.failed"] == 1


def test_a_whole_reply_stays_whole_when_its_client_leaves(talk):
    turn = talk.say([talk.user("hi")], talk.assistant("hello"), deliver=False)
    turn.cut("cancelled")
    assert talk.locate(talk.user("hi")).kind == "replay"
    assert talk.capture.counts["untrained.undelivered"] == 1
    turn.delivered()
    turn.cut("cancelled")
    assert turn.state == "delivered"


def test_a_turn_ends_once(talk):
    turn = talk.start(talk.user("hi"))
    with pytest.raises(InvalidFieldError, match="expected finished, got running"):
        turn.delivered()
    turn.cut("cancelled")
    for late in (lambda: talk.end(turn, talk.assistant("late")), lambda: talk.hear(turn, 1)):
        with pytest.raises(InvalidFieldError, match="expected running, got cut"):
            late()


def test_a_reply_tells_what_was_sampled(talk):
    talk.say([talk.user("hi")], talk.assistant("hello"))
    turn = talk.start(talk.user("hi"), talk.assistant("hello"), talk.user("more"))
    talk.hear(turn, 2)
    talk.hear(turn, 0)
    talk.hear(turn, 3)
    assert turn.tokens == 14
    reply = talk.end(turn, talk.assistant("fine", reasoning="Hm."), reasoning_tokens=2)
    assert (reply.id, reply.created, reply.finish) == ("1", 7, "stop")
    assert reply.usage == Usage(prompt=9, cached=6, sampled=5, reasoning=2)
    assert reply.token_ids == tuple(turn.sampled.token_ids.tolist())
    assert reply.logprobs == (-1.0,) * 5
    assert turn.prompt_ids.size == 9


def test_a_reply_of_no_tokens_is_never_trained(talk):
    turn = talk.start(talk.user("hi"))
    reply = talk.end(turn, talk.assistant(""))
    turn.delivered()
    assert (reply.usage.sampled, reply.token_ids) == (0, ())
    assert talk.capture.segments(trainable=True) == ()
    assert talk.capture.counts["untrained.empty"] == 1
    after = talk.say([talk.user("hi"), talk.assistant(""), talk.user("more")], talk.assistant("a"))
    assert after.base is turn
    assert [s.num_tokens for s in talk.capture.segments(trainable=True)] == [9]


def _broken(**others) -> Generated:
    arrays = {
        "token_ids": np.ones(2, np.int32),
        "logprobs": np.zeros(2, np.float32),
        "policy_version": np.zeros(2, np.int32),
        "context_version": np.zeros(2, np.int32),
    }
    return Generated(**arrays | others, length=False)


@pytest.mark.parametrize(
    ("piece", "field"),
    [
        (_broken(logprobs=np.asarray([0, np.nan], np.float32)), "logprobs"),
        (_broken(logprobs=np.asarray([0, -np.inf], np.float32)), "logprobs"),
        (_broken(logprobs=np.asarray([0, 0.5], np.float32)), "logprobs"),
        (_broken(logprobs=np.zeros(0, np.float32)), "logprobs"),
        (_broken(policy_version=np.asarray([0, -1], np.int32)), "policy_version"),
        (_broken(context_version=np.zeros(3, np.int32)), "context_version"),
        (_broken(token_ids=np.asarray([0, -1], np.int32)), "token_ids"),
    ],
)
def test_an_engine_that_breaks_its_contract_costs_its_turn_and_no_other(talk, piece, field):
    talk.say([talk.user("hi")], talk.assistant("hello"))
    bad = talk.start(talk.user("ho"))
    talk.hear(bad, 2)
    bad.heard(piece)
    assert len(talk.capture.segments(trainable=True)) == 1
    with pytest.raises(InvalidFieldError, match=f"generated.{field}"):
        talk.end(bad, talk.assistant("never"))
    bad.cut("failed")
    assert bad.tokens == bad.prompt_tokens
    assert [s.num_trained for s in talk.capture.segments(trainable=True)] == [3]
    worse = talk.start(talk.user("ho"))
    worse.heard(piece)
    worse.cut("failed")
    assert talk.capture.counts["untrained.failed"] == 2
    assert len(talk.capture.segments(trainable=True)) == 1


def test_what_was_sampled_before_a_turn_was_cut_is_kept(talk):
    turn = talk.start(talk.user("hi"))
    talk.hear(turn, 2)
    turn.cut("left")
    ones = np.ones(3, np.int32)
    turn.late(Generated(talk.tokens(3), -ones.astype(np.float32), ones, ones, length=False))
    (segment,) = talk.capture.segments(trainable=True)
    assert (segment.sampled.sum(), segment.num_trained) == (5, 0)
    assert turn.tokens == segment.num_tokens == turn.prompt_tokens + 5


def test_what_a_client_knows_of_a_cut_turn_gets_no_more_tokens(talk):
    turn = talk.start(talk.user("hi"))
    talk.hear(turn, 2)
    turn.cut("left", talk.assistant("hel"))
    ones = np.ones(3, np.int32)
    turn.late(Generated(talk.tokens(3), -ones.astype(np.float32), ones, ones, length=False))
    assert turn.sampled.token_ids.size == 2
    assert turn.tokens == turn.prompt_tokens + 2


def test_a_session_that_is_over_leaves_nothing_to_a_collector_of_garbage(talk):
    said = [talk.user("hi"), talk.assistant("hello"), talk.user("more"), talk.assistant("yes")]
    left = [weakref.ref(talk.say(said[:end], said[end]).new_ids) for end in (1, 3)]
    assert all(each() is not None for each in left)
    gc.disable()
    try:
        talk.capture.forget()
        assert [each() for each in left] == [None, None]
    finally:
        gc.enable()
