"""Which requests go on from which tokens."""

import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Sampling
from treadle_gateway.capture import keys
from treadle_gateway.capture.session import Capture
from treadle_gateway.conversation import Ask, Image, Message, Text, Tool, ToolCall
from treadle_gateway.errors import RefusedError

TOOL = Tool("look", "Looks.", {"type": "object", "properties": {"a": {"type": "string"}}})


def all_ids(turn) -> list[int]:
    return [*turn.prompt_ids.tolist(), *turn.sampled.token_ids.tolist()]


def test_the_prompt_that_went_before_stands_as_far_as_it_is_known_to_be_the_same(talk):
    first = talk.say([talk.user("hi")], talk.assistant("hello"))
    said = (talk.user("hi"), talk.assistant("hello"))
    second = talk.say([*said, talk.user("more")], talk.assistant("yes"))
    other = talk.start(*said, talk.user("else"))
    assert (first.stands(None), other.stands(second), first.stands(second)) == (0, 6, 0)
    for start in range(other.prompt_tokens + 1):
        assert other.prompt_from(start).tolist() == other.prompt_ids.tolist()[start:]


def test_a_second_turn_begins_with_the_very_ids_of_the_first(talk):
    first = talk.say([talk.user("hi")], talk.assistant("hello"))
    place = talk.locate(talk.user("hi"), talk.assistant("hello"), talk.user("more"))
    assert (place.base, place.tokens, place.closed) == (first, 6, True)
    assert place.before == (talk.user("hi"), talk.assistant("hello"))
    assert place.new == (talk.user("more"),)
    second = talk.begin(place)
    assert second.prompt_ids.dtype == np.int32
    assert second.prompt_ids.tolist()[:6] == all_ids(first)
    assert (second.cached, second.prompt_tokens) == (6, 9)
    assert second.stands(first) == 3
    assert second.prompt_from(3).tolist() == second.prompt_ids.tolist()[3:]


SAID = Message(
    "assistant",
    (Text("\n\nLooking.\n"),),
    reasoning="Hm. So.\n",
    calls=(
        ToolCall("call_1", "look", '{"b": 5000.0, "a": "\\u00e9"}'),
        ToolCall("call_2", "look", '{"a": '),
    ),
)


def with_calls(*arguments: str, name: str = "look") -> Message:
    calls = zip(SAID.calls, arguments, strict=True)
    return replace(SAID, calls=tuple(replace(c, name=name, arguments=a) for c, a in calls))


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(SAID, id="as-it-was"),
        pytest.param(with_calls('{"a":"é","b":5000}', '{"a": null}'), id="rewritten-arguments"),
        pytest.param(with_calls('{"__unparsedToolInput":{}}', "{}"), id="unparsed"),
        pytest.param(with_calls("{}", "{}", name="invalid"), id="renamed"),
        pytest.param(replace(SAID, parts=(Text("Looking."),)), id="trimmed"),
        pytest.param(replace(SAID, parts=(Text("Look"), Text("ing."))), id="blocks"),
        pytest.param(replace(SAID, parts=()), id="no-words-beside-calls"),
        pytest.param(replace(SAID, reasoning=""), id="reasoning-dropped"),
        pytest.param(replace(SAID, reasoning="Hm. So."), id="reasoning-trimmed"),
        pytest.param(
            replace(SAID, reasoning="", parts=(Text("<think>Hm. So.\n</think>"), *SAID.parts)),
            id="reasoning-as-words",
        ),
    ],
)
def test_a_reply_is_known_by_its_meaning(talk, told):
    first = talk.say([talk.user("hi")], SAID)
    results = [talk.result("call_1"), talk.result("call_2")]
    place = talk.locate(talk.user("hi"), told, *results)
    assert place.base is first
    assert place.before == (talk.user("hi"), SAID)  # in the policy's own words
    assert place.new == tuple(results)


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(replace(SAID, parts=(Text("Looked."),)), id="other-words"),
        pytest.param(replace(SAID, reasoning="Hm."), id="other-reasoning"),
        pytest.param(replace(SAID, calls=SAID.calls[:1]), id="a-call-less"),
        pytest.param(replace(SAID, calls=SAID.calls[::-1]), id="other-order-of-calls"),
        pytest.param(
            replace(SAID, calls=(*SAID.calls, ToolCall("call_3", "look", "{}"))), id="a-call-more"
        ),
        pytest.param(
            replace(SAID, calls=tuple(replace(call, id=f"{call.id}x") for call in SAID.calls)),
            id="other-ids",
        ),
        pytest.param(replace(SAID, calls=()), id="no-calls"),
        pytest.param(replace(SAID, role="user", calls=()), id="other-role"),
    ],
)
def test_changed_content_is_context(talk, told):
    talk.say([talk.user("hi")], SAID)
    place = talk.locate(talk.user("hi"), told, talk.user("more"))
    assert place.base is None
    assert place.new == (talk.user("hi"), told, talk.user("more"))
    again = talk.say(place.new, talk.assistant("fine"))
    place = talk.locate(*place.new, talk.assistant("fine"), talk.user("on"))
    assert place.base is again


def test_words_added_beside_calls_are_changed_content(talk):
    talk.say([talk.user("hi")], talk.assistant("", "call_1"))
    told = talk.assistant("words", "call_1")
    assert talk.locate(talk.user("hi"), told, talk.result("call_1")).base is None


@pytest.mark.parametrize(
    ("known", "told", "same"),
    [
        pytest.param((Text("ab"),), (Text("a"), Text("b")), True, id="blocks"),
        pytest.param((Text("ab"),), (Text("ab\n"),), False, id="a-newline"),
        pytest.param((Text("a"),), (Text("a"), Image("0f", "image/png")), False, id="a-picture"),
        pytest.param((Image("0e", ""),), (Image("0f", ""),), False, id="another-picture"),
        pytest.param((Image("0f", ""), Text("a")), (Text("a"), Image("0f", "")), False, id="order"),
    ],
)
def test_what_a_user_says_is_compared_letter_by_letter(talk, known, told, same):
    first = talk.say([Message("user", known)], talk.assistant("yes"))
    place = talk.locate(Message("user", told), talk.assistant("yes"), talk.user("more"))
    assert (place.base is first) == same


def test_a_results_call_and_error_are_content(talk):
    reply = talk.assistant("", "call_1", "call_2")
    told = [talk.user("hi"), reply, talk.result("call_1"), talk.result("call_2")]
    talk.say(told[:1], reply)
    second = talk.say(told, talk.assistant("done"))
    done = [talk.assistant("done"), talk.user("more")]
    swapped = [*told[:2], talk.result("call_2"), talk.result("call_1")]
    failed = [*told[:3], replace(told[3], is_error=True)]
    assert talk.locate(*told, *done).base is second
    assert talk.locate(*swapped, *done).base is not second
    assert talk.locate(*failed, *done).base is not second


def test_other_tools_begin_a_new_context(talk):
    first = talk.say([talk.user("hi")], SAID, tools=(TOOL,))
    told = (talk.user("hi"), replace(SAID, reasoning=""), talk.result("call_1"))
    reordered = replace(TOOL, parameters=dict(reversed(TOOL.parameters.items())))
    assert talk.locate(*told, tools=(reordered,)).base is first
    for others in ({"tools": ()}, {"tools": (TOOL, TOOL)}, {"tools": (TOOL,), "reasoning": False}):
        place = talk.locate(*told, **others)
        assert place.base is None
        assert place.new == (told[0], SAID, told[2])
        assert place.label == "main"


def test_a_reply_cut_by_length_goes_on_unclosed_if_it_is_kept_whole(talk):
    turn = talk.start(talk.user("hi"))
    talk.hear(turn, 3, length=True)
    talk.end(turn, talk.assistant("one two"), "length")
    turn.delivered()
    whole = talk.locate(talk.user("hi"), talk.assistant("one two"), talk.user("go on"))
    assert (whole.base, whole.closed) == (turn, False)
    part = talk.locate(talk.user("hi"), talk.assistant("one"), talk.user("go on"))
    assert (part.base, len(part.new)) == (None, 3)


def test_a_reply_cut_by_length_is_gone_on_with_where_it_ends(talk):
    turn = talk.start(talk.user("hi"))
    talk.hear(turn, 3, length=True)
    talk.end(turn, talk.assistant("one two"), "length")
    place = talk.locate(talk.user("hi"), talk.assistant("one two"))
    assert (place.base, place.new, place.closed) == (turn, (), False)
    rest = talk.capture.begin(place, talk.tokens(0), sampling=Sampling(), trained=True, now=0.0)
    assert rest.prompt_ids.tolist() == all_ids(turn)
    part = talk.locate(talk.user("hi"), talk.assistant("one"))
    assert (part.base, len(part.new)) == (None, 2)


@pytest.mark.parametrize(
    ("reply", "finish", "others"),
    [
        pytest.param({"text": "one"}, "stop", {}, id="ended-by-itself"),
        pytest.param({"text": "one"}, "stop", {"stop": "#"}, id="ended-by-a-stop-text"),
        pytest.param({"reasoning": "Hm"}, "length", {}, id="cut-in-its-reasoning"),
    ],
)
def test_no_other_reply_is(talk, reply, finish, others):
    turn = talk.start(talk.user("hi"))
    talk.hear(turn, 3)
    talk.end(turn, talk.assistant(**reply), finish, **others)
    place = talk.locate(talk.user("hi"), talk.assistant(**reply))
    assert (place.base, len(place.new)) == (None, 2)


def test_a_stop_text_leaves_a_turn_unclosed(talk):
    turn = talk.start(talk.user("hi"))
    talk.hear(turn, 3)
    assert talk.end(turn, talk.assistant("one"), stop="###").stop == "###"
    assert not talk.locate(talk.user("hi"), talk.assistant("one"), talk.user("on")).closed


def test_what_was_kept_of_a_cancelled_turn_is_its_tokens_only_if_it_is_all(talk):
    turn = talk.start(talk.user("hi"))
    talk.hear(turn, 2)
    turn.cut("cancelled", talk.assistant("one two"))
    kept = talk.locate(talk.user("hi"), talk.assistant("one two"), talk.user("resume"))
    assert (kept.base, kept.closed) == (turn, False)
    less = talk.locate(talk.user("hi"), talk.assistant("one"), talk.user("resume"))
    assert less.base is None


def test_an_assistant_message_at_the_end_is_context_to_continue(talk):
    first = talk.say([talk.user("hi")], talk.assistant("hello"))
    place = talk.locate(talk.user("hi"), talk.assistant("hello"))
    assert (place.base, len(place.new)) == (None, 2)
    told = [talk.user("hi"), talk.assistant("hello"), talk.user("and"), talk.assistant("The")]
    place = talk.locate(*told)
    assert (place.base, place.new) == (first, tuple(told[2:]))


def test_messages_that_the_policy_did_not_write_are_context_whatever_their_role(talk):
    told = [talk.assistant("Welcome!"), talk.user("hi")]
    assert talk.locate(*told).base is None
    first = talk.say(told, talk.assistant("Welcome!"))
    place = talk.locate(*told, talk.assistant("Welcome!"), talk.user("more"))
    assert place.base is first


def test_words_of_others_that_were_rendered_without_reasoning_have_none(talk):
    def told(reasoning: str) -> list[Message]:
        return [talk.user("hi"), talk.assistant("theirs", reasoning=reasoning), talk.user("more")]

    talk.say(told("A"), talk.assistant("one"))
    bare = talk.say(told(""), talk.assistant("two"))
    on = [talk.assistant("two"), talk.user("on")]
    assert talk.locate(*told(""), *on).base is bare
    assert talk.locate(*told("A"), *on).base is None


def test_calls_of_others_are_the_same_in_any_order_of_arguments(talk):
    def foreign(arguments: str) -> Message:
        return Message("assistant", calls=(ToolCall("theirs", "look", arguments),))

    told = [talk.user("hi"), foreign('{"a": 1.0, "b": 2}'), talk.result("theirs")]
    first = talk.say(told, talk.assistant("yes"))
    more = [talk.assistant("yes"), talk.user("more")]
    assert talk.locate(told[0], foreign('{"b":2,"a":1}'), told[2], *more).base is first
    assert talk.locate(told[0], foreign('{"b":3,"a":1}'), told[2], *more).base is None


def test_of_replies_that_mean_the_same_the_newest_delivered_is_meant(talk):
    turns = [talk.say([talk.user("hi")], talk.assistant("yes")) for _ in range(2)]
    talk.say([talk.user("hi")], talk.assistant("yes"), deliver=False)
    told = [talk.user("hi"), talk.assistant("yes"), talk.user("more")]
    assert talk.locate(*told).base is turns[1]


def test_reasoning_that_is_left_out_means_whichever_reply_goes_on(talk):
    """The newest is meant, unless what follows is known to follow another."""
    hi, more, on = talk.user("hi"), talk.user("more"), talk.user("on")
    first = talk.say([hi], talk.assistant("yes", reasoning="A"))
    second = talk.say([hi, talk.assistant("yes", reasoning="A"), more], talk.assistant("two"))
    third = talk.say([hi], talk.assistant("yes", reasoning="B"))
    place = talk.locate(hi, talk.assistant("yes"), more, talk.assistant("two"), on)
    assert (place.base, second.base) == (second, first)
    assert talk.locate(hi, talk.assistant("yes"), talk.user("else")).base is third


def test_where_a_template_lets_fewer_messages_stand_an_earlier_turn_goes_on(talk):
    told = [talk.user("1")]
    turns = []
    for number in ("2", "3", "4"):
        reply = talk.assistant(f"reply {number}")
        turns.append(talk.say(told, reply))
        told += [reply, talk.user(number)]
    place = talk.locate(*told)
    assert (place.base, len(place.before), len(place.new)) == (turns[2], 6, 1)
    fewer = place.keep(5)
    assert (fewer.base, len(fewer.before), len(fewer.new)) == (turns[1], 4, 3)
    assert fewer.before + fewer.new == place.before + place.new
    assert (place.keep(6), place.keep(1).base, place.keep(1).tokens) == (place, None, 0)
    again = talk.begin(place.keep(1))
    assert again.cached == 0
    talk.end(again, talk.assistant("fresh"))
    again.delivered()
    place = talk.locate(*told, talk.assistant("fresh"), talk.user("5"))
    # Behind a turn that was rendered anew, the tokens of the earlier ones stand no more.
    assert (place.base, place.keep(6).base) == (again, None)


@pytest.mark.parametrize(
    "told",
    [
        pytest.param([], id="nothing"),
        pytest.param([Message("tool", (Text("seen"),), call_id="call_9")], id="unheard-of-call"),
    ],
)
def test_what_cannot_be_a_conversation_is_refused(talk, told):
    with pytest.raises(RefusedError) as refused:
        talk.locate(*told)
    assert refused.value.kind == "invalid"
    assert refused.value.field.startswith("messages")


def test_a_result_may_answer_a_call_of_the_session_or_of_the_request(talk):
    talk.say([talk.user("hi")], talk.assistant("", "call_1"))
    talk.locate(talk.user("a summary"), talk.result("call_1"))
    talk.locate(talk.user("hi"), talk.assistant("", "theirs"), talk.result("theirs"))


def test_a_result_may_name_no_call(talk):
    """An agent that reads calls out of the text has no ids for them."""
    first = talk.say([talk.user("hi")], talk.assistant("<call>look</call>"))
    assert (
        talk.locate(talk.user("hi"), talk.assistant("<call>look</call>"), talk.result("")).base
        is first
    )


def test_requests_over_the_limit_are_refused_for_good(talk):
    talk.capture = Capture(max_requests=1)
    talk.say([talk.user("hi")], talk.assistant("hello"))
    with pytest.raises(RefusedError, match="over its limit of 1") as refused:
        talk.locate(talk.user("hi"))
    assert (refused.value.kind, refused.value.limit) == ("invalid", 1)


def test_a_prompt_without_a_token_is_refused(talk):
    place = talk.locate(talk.user("hi"))
    none = talk.tokens(0)
    with pytest.raises(InvalidFieldError, match="new_ids"):
        talk.capture.begin(place, none, sampling=Sampling(), trained=True, now=0.0)


def _calls_of_python(work):
    """How many functions are called, but those that hash, and what comes of it."""
    seen = 0

    def profile(frame, event, _argument):
        nonlocal seen
        seen += event == "call" and frame.f_code.co_filename != keys.__file__

    sys.setprofile(profile)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    return seen, result


def test_a_long_history_costs_little_beyond_its_hashing(talk):
    told = [talk.user("hi")]
    costs = []
    for number in range(64):
        reply = talk.assistant(f"reply {number}", f"call_{number}")
        ask = Ask("policy", tuple(told), (TOOL,))
        locate, place = _calls_of_python(partial(talk.capture.locate, ask))
        turn = talk.begin(place)
        talk.hear(turn, 3)
        finish, _ = _calls_of_python(partial(talk.end, turn, reply))
        turn.delivered()
        costs.append((locate / len(told), finish))
        told += [reply, talk.result(f"call_{number}")]
    assert costs[63][0] <= 7  # for each message
    assert costs[63][1] == costs[3][1]
