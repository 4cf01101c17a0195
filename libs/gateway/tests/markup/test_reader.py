"""What a policy samples, as events."""

import itertools
import json
from collections.abc import Sequence
from functools import cache
from random import Random

import pytest
from tokenizers import Tokenizer

from treadle_gateway.conversation import (
    ArgumentsDelta,
    CallEnded,
    CallStarted,
    Event,
    Message,
    ReasoningDelta,
    Text,
    TextDelta,
    Tool,
    ToolCall,
    ToolChoice,
)
from treadle_gateway.markup.reader import Reader

FIND = Tool(
    "find",
    "",
    {"type": "object", "properties": {"what": {"type": "string"}, "most": {"type": "integer"}}},
)
SEND = Tool("send", "", {"type": "object"}, namespace="mail")
TOOLS = [FIND, SEND]

DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{}\n```"
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>find<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)


class Policy:
    """A model of a family, as far as what it says is concerned."""

    def __init__(self, family, name: str) -> None:
        self.markup = family(name)
        self._tokenizer = Tokenizer.from_file(str(family.folder(name) / "tokenizer.json"))

    def ids(self, *texts: str) -> list[int]:
        """Tokens of each text; where texts meet, no token is made of both."""
        encoded = (self._tokenizer.encode(text, add_special_tokens=False) for text in texts)
        return [token for each in encoded for token in each.ids]

    def reader(self, tools: Sequence[Tool] = TOOLS, **more) -> Reader:
        numbers = itertools.count(1)
        more = {"reasoning": True, "stop": ()} | more
        return self.markup.reader(tools=tools, new_id=lambda: f"call{next(numbers)}", **more)

    def says(self, *texts: str, length: bool = False, **more):
        """All events, the message, why it ended, and the reader."""
        reader = self.reader(**more)
        events: list[Event] = []
        for token in self.ids(*texts):
            events += reader.feed([token])
        rest, message, finish = reader.finish(length=length)
        return events + rest, message, finish, reader


@pytest.fixture(scope="module")
def policy(family):
    return cache(lambda name: Policy(family, name))


@pytest.mark.parametrize(
    ("family_name", "said", "text", "calls"),
    [
        pytest.param(
            "qwen2",
            'Now.\n<tool_call>\n{"name": "find", "arguments": {"what": "a\\"}", "most": 1.0}}\n'
            '</tool_call>\n<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>',
            "Now.",
            [("find", '{"what": "a\\"}", "most": 1.0}'), ("find", "{}")],
            id="hermes",
        ),
        pytest.param(
            "chatml",  # its markers are not tokens of their own
            '<tool_call>\n{"name": "find", "arguments": {"what": "<tool_cal"}}\n</tool_call>\nDone',
            "Done",
            [("find", '{"what": "<tool_cal"}')],
            id="hermes-in-letters",
        ),
        pytest.param(
            "qwen3",
            '<tool_call>{"arguments": {"what": "x"}, "name": "find"}</tool_call>',
            "",
            [("find", '{"what": "x"}')],
            id="arguments-first",
        ),
        pytest.param(
            "qwen_coder",
            "So:\n\n<tool_call>\n<function=find>\n<parameter=what>\n12\n</parameter>\n"
            "<parameter=most>\n3\n</parameter>\n</function>\n</tool_call>",
            "So:",
            [("find", '{"what": "12", "most": 3}')],
            id="qwen-coder",
        ),
        pytest.param(
            "llama3",
            '<|python_tag|>{"name": "find", "parameters": {"most": 2}}; {"name": "find", '
            '"parameters": {}}',
            "",
            [("find", '{"most": 2}'), ("find", "{}")],
            id="llama",
        ),
        pytest.param(
            "llama3",
            '{"name": "find", "parameters": {"most": 2}}',
            "",
            [("find", '{"most": 2}')],
            id="llama-bare",
        ),
        pytest.param(
            "llama3", '{"name": "Anna"}', '{"name": "Anna"}', [], id="llama-answers-in-json"
        ),
        pytest.param(
            "mistral",
            '[TOOL_CALLS] [{"name": "find", "arguments": {"most": 2}, "id": "abcdefghi"}, '
            '{"name": "find", "arguments": {}, "id": "jklmnopqr"}]',
            "",
            [("find", '{"most": 2}'), ("find", "{}")],
            id="mistral",
        ),
        pytest.param(
            "mistral",
            'Ok.[TOOL_CALLS]find[ARGS]{"most": 2}[TOOL_CALLS]find[ARGS]{}',
            "Ok.",
            [("find", '{"most": 2}'), ("find", "{}")],
            id="mistral-named",
        ),
        pytest.param(
            "deepseek_r1",
            "Hm.\n</think>\n\n" + DEEPSEEK,
            "",
            [("find", "{}"), ("find", "{}")],
            id="deepseek",
        ),
        pytest.param(
            "qwen2",
            '<tool_call>\n{"name": "mail.send", "arguments": {}}\n</tool_call>',
            "",
            [("send", "{}")],
            id="a-tool-of-a-namespace",
        ),
        pytest.param(
            "qwen2",
            '<tool_call>\n{"name": "lose", "arguments": {}}\n</tool_call>',
            "",
            [("lose", "{}")],
            id="a-tool-that-there-is-not",
        ),
        pytest.param(
            "qwen2",
            '<tool_call>\n{"name": "find", "arguments": {"what": oops}}\n</tool_call>',
            "",
            [("find", '{"what": oops}')],
            id="arguments-that-are-no-json-are-kept",
        ),
        pytest.param(
            "qwen2",
            '<tool_call>\n{"name": "find", "arguments": {"what": "x</tool_call>',
            "",
            [("find", '{"what": "x')],
            id="arguments-cut-off-are-kept",
        ),
        pytest.param(
            "qwen2",
            "<tool_call>\n{'name': 'find'}\n</tool_call>",
            "<tool_call>\n{'name': 'find'}\n</tool_call>",
            [],
            id="a-block-without-a-name-is-text",
        ),
        pytest.param(
            "mistral",
            '```\n[TOOL_CALLS][{"name": "find", "arguments": {}}]\n```',
            '```\n[{"name": "find", "arguments": {}}]\n```',
            [],
            id="a-code-fence-is-text-and-shows-no-markup",
        ),
        pytest.param("llama3", '{"name": "a\\x"', '{"name": "a\\x"', [], id="llama-says-no-json"),
        pytest.param(
            "qwen2",
            '```\n<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>\n```\nis how.',
            '```\n<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>\n```\nis how.',
            [],
            id="a-code-fence-is-text",
        ),
    ],
)
def test_calls_are_read_as_they_were_said(policy, family_name, said, text, calls) -> None:
    model = policy(family_name)
    events, message, finish, _ = model.says(said, model.markup.probe.form.end)

    assert message.text == text
    assert [(call.name, call.arguments) for call in message.calls] == calls
    assert finish == ("calls" if calls else "stop")
    assert spelt(events) == message


def spelt(events: Sequence[Event]) -> Message:
    """The message that the events say; each call is started, argued and ended in its order."""
    text = "".join(each.text for each in events if isinstance(each, TextDelta))
    reasoning = "".join(each.text for each in events if isinstance(each, ReasoningDelta))
    calls: list[ToolCall] = []
    open_call: list = []
    for each in events:
        if isinstance(each, CallStarted):
            assert not open_call
            open_call = [each, ""]
        elif isinstance(each, ArgumentsDelta):
            assert each.text
            open_call[1] += each.text
        elif isinstance(each, CallEnded):
            started, arguments = open_call
            calls.append(ToolCall(started.id, started.name, arguments, started.namespace))
            open_call = []
        else:
            assert each.text
            assert not open_call
    assert not open_call
    return Message("assistant", (Text(text),) if text else (), reasoning, tuple(calls))


def test_arguments_come_while_they_are_sampled(policy) -> None:
    model = policy("qwen2")
    reader = model.reader()
    begun = reader.feed(model.ids("<tool_call>", '\n{"name": "find", "arguments": {"what": "long'))
    assert begun == [CallStarted("call1", "find"), ArgumentsDelta('{"what": "long')]


def test_an_id_of_the_policys_own_ends_ours(policy) -> None:
    said = '[TOOL_CALLS] [{"name": "find", "arguments": {}, "id": "abcdefghi"}]'
    _, message, _, _ = policy("mistral").says(said)
    assert message.calls[0].id == "call1abcdefghi"


@pytest.mark.parametrize(
    ("family_name", "wants", "said", "reasoning", "text", "tokens_of"),
    [
        pytest.param(
            "qwen3",
            True,
            ("<think>\nHm,\nso.\n", "</think>", "\n\nYes."),
            "Hm,\nso.",
            "Yes.",
            2,
            id="between-tags",
        ),
        pytest.param(
            "chatml",
            True,
            ("<think>\nHm.\n</think>", "\n\nYes."),
            "Hm.",
            "Yes.",
            1,
            id="between-tags-in-letters",
        ),
        pytest.param(
            "deepseek_r1",
            True,
            ("Hm.\n</think>", "\n\nYes."),
            "Hm.",
            "Yes.",
            1,
            id="begun-by-the-prompt",
        ),
        pytest.param("qwen3", False, ("Yes.",), "", "Yes.", 0, id="not-wanted"),
        pytest.param(
            "qwen3", True, ("<think>\n\n</think>", "\n\nYes."), "", "Yes.", 1, id="of-nothing"
        ),
        pytest.param("qwen3", True, ("<think>\nHm",), "Hm", "", 1, id="never-ended"),
        pytest.param(
            "qwen3",
            True,
            ("\n", "<think>", "Hm", "</think>", "Yes."),
            "Hm",
            "Yes.",
            4,
            id="behind-space",
        ),
        pytest.param(
            "qwen3", True, ("I say <think> now.",), "", "I say <think> now.", 0, id="only-first"
        ),
    ],
)
def test_reasoning_is_told_apart_and_its_tokens_counted(
    policy, family_name, wants, said, reasoning, text, tokens_of
) -> None:
    model = policy(family_name)
    events, message, finish, reader = model.says(*said, reasoning=wants)
    assert (message.reasoning, message.text, finish) == (reasoning, text, "stop")
    assert reader.reasoning_tokens == len(model.ids(*said[:tokens_of]))
    assert spelt(events) == message


def test_an_assistants_words_that_are_gone_on_with_are_no_reasoning(policy) -> None:
    _, message, _, _ = policy("deepseek_r1").says("Yes.", goes_on=True)
    assert (message.text, message.reasoning) == ("Yes.", "")


def test_half_a_character_is_never_told(policy) -> None:
    model = policy("qwen2")
    ids = model.ids("ab🙂")
    reader = model.reader()
    told = [reader.feed([token]) for token in ids[:-1]]
    assert [event for events in told for event in events] == [TextDelta("a"), TextDelta("b")]
    assert reader.finish(length=True)[0] == []
    assert reader.reasoning_tokens == 0


def test_what_is_no_character_does_not_hold_up_what_follows(policy) -> None:
    model = policy("qwen2")
    reader = model.reader()
    told = reader.feed([*model.ids("🙂")[:2], *model.ids("ok")])
    assert told == [TextDelta("\ufffdok")]


def test_a_character_that_no_request_may_hold_is_told_as_its_picture(policy) -> None:
    _, message, _, _ = policy("qwen2").says("a\0", "b")
    assert message.text == "a␀b"


@pytest.mark.parametrize("said", ["One\nObservation: two", "One\nObs", "One\nObservatory"])
@pytest.mark.parametrize("cut", range(1, 12))
def test_a_stop_text_split_over_tokens_is_never_told(policy, said: str, cut: int) -> None:
    stop = "\nObservation:"
    events, message, finish, reader = policy("qwen2").says(said[:cut], said[cut:], stop=[stop])
    whole, found, _ = said.partition(stop)
    assert message.text == whole
    assert reader.stopped == (stop if found else "")
    assert finish == "stop"
    assert spelt(events) == message


def test_a_stop_text_ends_a_call_too_and_what_follows_is_not_read(policy) -> None:
    said = '<tool_call>\n{"name": "find", "arguments": {"what": "xSTOPy"}}\n</tool_call>'
    events, message, _, reader = policy("qwen2").says(said, stop=["STOP"])
    assert [call.arguments for call in message.calls] == ['{"what": "x']
    assert reader.stopped == "STOP"
    assert spelt(events) == message


def test_a_stop_text_may_be_a_token_of_the_model(policy) -> None:
    said = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>more'
    _, message, _, reader = policy("qwen2").says(said, stop=["</tool_call>"])
    assert (len(message.calls), message.text, reader.stopped) == (1, "", "</tool_call>")


def test_text_that_looks_like_a_marker_is_text_where_the_model_has_a_token_for_it(policy) -> None:
    said = ("<tool", '_call>{"name": "find", "arguments": {}}</tool', "_call>")
    _, message, finish, _ = policy("qwen2").says(*said)
    assert (message.text, message.calls, finish) == ("".join(said), (), "stop")


def test_a_call_is_text_where_none_is_wanted_or_there_are_no_tools(policy) -> None:
    said = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
    for more in ({"choice": ToolChoice("none")}, {"tools": []}):
        _, message, finish, _ = policy("qwen2").says(said, **more)
        assert (message.text, message.calls, finish) == (said, (), "stop")


def test_length_ends_a_call_that_had_begun(policy) -> None:
    said = '<tool_call>\n{"name": "find", "arguments": {"what": "x'
    events, message, finish, _ = policy("qwen2").says(said, length=True)
    assert ([call.arguments for call in message.calls], finish) == (['{"what": "x'], "length")
    assert events[-1] == CallEnded()


def test_markup_is_never_told(policy) -> None:
    _, message, _, _ = policy("qwen2").says("a<|im_start|>user\nb<|endoftext|><|im_end|>")
    assert message.text == "auser\nb"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "family_name", ["chatml", "qwen3", "qwen_coder", "llama3", "mistral", "deepseek_r1"]
)
def test_whatever_is_sampled_is_read_the_same_however_it_comes(policy, family_name, seed) -> None:
    model, random = policy(family_name), Random(seed)  # noqa: S311
    tokens = [*model.markup._words.added, *range(300)]
    letters = model.ids('{"name": "find", "arguments": {}}<function=find>\n```\n')
    ids = [random.choice(random.choice((tokens, letters))) for _ in range(120)]

    one, all_at_once = model.reader(stop=["ab"]), model.reader(stop=["ab"])
    events = [event for token in ids for event in one.feed([token])]
    rest, message, finish = one.finish(length=False)
    told = all_at_once.feed(ids)
    told_rest, *same = all_at_once.finish(length=False)

    assert same == [message, finish]
    assert spelt(events + rest) == message
    assert spelt(told + told_rest) == message
    assert one.reasoning_tokens == all_at_once.reasoning_tokens <= len(ids)
    for hidden in model.markup._words.hidden:
        assert hidden not in message.text + message.reasoning
    json.dumps([call.arguments for call in message.calls]).encode()
