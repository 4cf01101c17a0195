"""What the probe finds of each family, and how that which a template does not take is said."""

import json
from pathlib import Path

import pytest

from treadle_gateway.conversation import Image, Message, Text, Tool, ToolCall
from treadle_gateway.errors import RefusedError
from treadle_gateway.markup.errors import UnsupportedTemplateError
from treadle_gateway.markup.template import Markup

TEMPLATES = Path(__file__).with_name("templates")
FIND = Tool("find", "Finds.", {"type": "object", "properties": {}})


def said(role, text: str = "", **more) -> Message:
    return Message(role, (Text(text),) if text else (), **more)


def calling(*arguments: str, text: str = "") -> Message:
    calls = (ToolCall(f"call_0000{n}", "find", each) for n, each in enumerate(arguments))
    return said("assistant", text, calls=tuple(calls))


def text_of(markup: Markup, *new: Message, before=(), tools=(), **more) -> str:
    return markup.decode(markup.render(before, new, tools=tools, **more))


@pytest.mark.parametrize(
    ("family_name", "found"),
    [
        (
            "chatml",
            {"tools": "told in a system message", "calls": "hermes", "end of a turn": "<|im_end|>"},
        ),
        ("qwen2", {"tools": "taken", "calls": "hermes", "arguments of a call": "a mapping"}),
        (
            "qwen3",
            {
                "arguments of a call": "a string",
                "reasoning of a message": "a field",
                "reasoning is switched by": "enable_thinking",
                "turns before a user speaks": "are written anew",
                "turns before a tool speaks": "are written anew in 8 of 16 circumstances, "
                "always with no reasoning in them",
            },
        ),
        ("qwen_coder", {"calls": "qwen-coder", "arguments of a call": "a mapping"}),
        ("llama3", {"calls": "llama", "several calls in a message": "each with its own result"}),
        (
            "mistral",
            {
                "calls": "mistral",
                "ids of calls": "nine letters or digits",
                "a role twice in a row": "both are one message",
                "turns before a tool speaks": "are written anew in 8 of 16 circumstances, "
                "always with system message",
            },
        ),
        ("mistral_named", {"calls": "mistral", "arguments of a call": "a string"}),
        (
            "deepseek_r1",
            {
                "calls": "deepseek",
                "arguments of a call": "a string",
                "prompt opens reasoning": "always",
                "turns before a tool speaks": "are written anew",
            },
        ),
        (
            "gemma",
            {
                "system message that leads": "leads the first question",
                "system message further down": "the user says it",
                "turns before a user speaks": "stay",
            },
        ),
        ("vision", {"images": "<|vision_start|><|image_pad|><|vision_end|>"}),
        ("unended", {"end of a turn": "none is written; the sampled one stays"}),
    ],
)
def test_the_probe_shows_what_it_found(family, family_name: str, found) -> None:
    rows = dict(family(family_name).probe.rows())
    assert {what: rows[what] for what in found} == found


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        pytest.param("{{ messages[0].role }}", "what a user says is not in", id="deaf"),
        pytest.param("{{ raise_exception('never') }}", "a question of a user: never", id="no"),
        pytest.param("{{ messages[0].content }}", "another question", id="only-the-first"),
        pytest.param("{% if %}", "a chat template in Jinja", id="broken"),
        pytest.param("{{ nothing.at.all }}", "it refuses a question", id="trips"),
        pytest.param(
            "{% for m in messages %}<|im_start|>{{ m.role }}"
            "{{ ' final: ' if m.role == 'assistant' }}{{ m.content }}<|im_end|>{% endfor %}"
            "<|im_start|>assistant",
            "markup that cannot be read",
            id="channels",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_with_the_reason(
    folder, template, reason
) -> None:
    with pytest.raises(UnsupportedTemplateError, match=reason):
        Markup(folder("chatml", template=template))


@pytest.mark.parametrize(
    ("family_name", "messages", "text"),
    [
        pytest.param(
            "gemma",
            [said("system", "Be brief."), said("user", "Hi"), said("system", "Now."), said("user")],
            "<bos><start_of_turn>user\nBe brief.\n\nHi\n\n<system>\nNow.\n</system><end_of_turn>\n"
            "<start_of_turn>model\n",
            id="system-messages-without-a-role",
        ),
        pytest.param(
            "gemma",
            [said("system", "Be brief.")],
            "<bos><start_of_turn>user\nBe brief.<end_of_turn>\n<start_of_turn>model\n",
            id="a-system-message-alone",
        ),
        pytest.param(
            "mistral",
            [said("user", "Hi"), said("assistant", "A"), said("assistant", "B"), said("user", "C")],
            "<s>[INST] Hi[/INST] A\n\nB</s>[INST] C[/INST]",
            id="assistants-in-a-row",
        ),
        pytest.param(
            "mistral",
            [said("user", "Hi"), calling("{}"), said("tool", "ok", call_id="call_00000")],
            '<s>[INST] Hi[/INST][TOOL_CALLS] [{"name": "find", "arguments": {}, "id": "all00000"}]'
            '</s>[TOOL_RESULTS] {"content": "ok", "call_id": "all00000"}[/TOOL_RESULTS]'.replace(
                "all00000", "all00000".rjust(9, "c")
            ),
            id="short-ids",
        ),
        pytest.param(
            "llama3",
            [
                said("user", "Hi"),
                calling('{"a": 1}', '{"a": 2}'),
                said("tool", "one", call_id="call_00000"),
                said("tool", "two", call_id="call_00001"),
            ],
            '{"name": "find", "parameters": {"a": 1}}<|eot_id|><|start_header_id|>ipython'
            "<|end_header_id|>\n\none<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
            '{"name": "find", "parameters": {"a": 2}}<|eot_id|><|start_header_id|>ipython'
            "<|end_header_id|>\n\ntwo<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
            id="one-call-at-a-time",
        ),
        pytest.param(
            "llama3",
            [said("user", "Hi"), calling("{}", text="So:")],
            "<|start_header_id|>assistant<|end_header_id|>\n\nSo:<|eot_id|><|start_header_id|>"
            'assistant<|end_header_id|>\n\n{"name": "find", "parameters": {}}<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            id="words-beside-a-call",
        ),
        pytest.param(
            "qwen2",
            [said("user", "Hi"), calling('{"a": oops', text="So:")],
            '<|im_start|>assistant\nSo:\n<tool_call>\n{"name": "find", "arguments": '
            '{"unparsed": "{\\"a\\": oops"}}\n</tool_call><|im_end|>\n<|im_start|>assistant\n',
            id="arguments-that-are-no-json-for-a-template-that-wants-a-mapping",
        ),
        pytest.param(
            "qwen3",
            [said("user", "Hi"), calling('{"a":  oops')],
            '<tool_call>\n{"name": "find", "arguments": {"a":  oops}\n</tool_call><|im_end|>\n'
            "<|im_start|>assistant\n",
            id="arguments-that-are-no-json-for-a-template-that-wants-text",
        ),
        pytest.param(
            "deepseek_r1",
            [said("user", "Hi"), calling('{"a":1}'), said("tool", "ok", call_id="call_00000")],
            '<｜tool▁sep｜>find\n```json\n{"a":1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
            "<｜end▁of▁sentence｜><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>ok"
            "<｜tool▁output▁end｜><｜tool▁outputs▁end｜><think>\n",
            id="arguments-as-they-were-said",
        ),
        pytest.param(
            "chatml",
            [
                said("user", "Hi"),
                calling('{"a": 1}', text="So:"),
                said("tool", "ok", call_id="call_00000"),
            ],
            '<|im_start|>assistant\nSo:\n<tool_call>\n{"name": "find", "arguments": {"a": 1}}\n'
            "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nok\n</tool_response>"
            "<|im_end|>\n<|im_start|>assistant\n",
            id="calls-and-results-that-are-told",
        ),
        pytest.param(
            "chatml",
            [said("user", "Hi"), said("assistant", "find a"), said("tool", "ok")],
            "<|im_start|>assistant\nfind a<|im_end|>\n<|im_start|>tool\nok<|im_end|>\n"
            "<|im_start|>assistant\n",
            id="a-result-of-a-call-in-words",
        ),
        pytest.param(
            "vision",
            [Message("user", (Text("What "), Text("is "), Image("0", "image/png"), Text("?")))],
            "<|im_start|>user\nWhat is <|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n"
            "<|im_start|>assistant\n",
            id="an-image",
        ),
    ],
)
def test_what_a_template_does_not_take_is_said_in_another_way(
    family, family_name: str, messages, text: str
) -> None:
    rendered = text_of(family(family_name), *messages)
    assert rendered.endswith(text)


def test_tools_without_a_place_in_the_template_are_told_in_a_system_message(family) -> None:
    markup = family("chatml")
    told = text_of(markup, said("system", "Be brief."), said("user", "Hi"), tools=[FIND])
    assert told.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert json.dumps({"name": "find"})[1:-1] in told
    alone = text_of(markup, said("user", "Hi"), tools=[FIND])
    assert alone.startswith("<|im_start|>system\n# Tools\n")


def test_tools_are_refused_where_calls_cannot_be_read(folder, family) -> None:
    family("qwen2")
    template = (family.folder("qwen2") / "chat_template.jinja").read_text()
    markup = Markup(folder("qwen2", template=template.replace('{"name": "', "(call ")))
    assert dict(markup.probe.rows())["calls"] == "in no format that can be read"
    text_of(markup, said("user", "Hi"))
    with pytest.raises(RefusedError, match="tools: "):
        text_of(markup, said("user", "Hi"), tools=[FIND])


def test_calls_of_a_template_that_looks_for_content_of_none_are_written(folder, family) -> None:
    family("deepseek_r1")
    template = (family.folder("deepseek_r1") / "chat_template.jinja").read_text()
    strict = template.replace("message.tool_calls %}", "message.content is none %}", 1)
    assert strict != template
    markup = Markup(folder("deepseek_r1", template=strict))
    assert "<｜tool▁sep｜>find" in text_of(markup, said("user", "Hi"), calling("{}", text="So:"))


def test_tools_are_told_where_the_template_writes_no_calls(folder) -> None:
    plain = (TEMPLATES / "chatml.jinja").read_text()
    markup = Markup(folder("chatml", template="{{ tools | tojson if tools }}" + plain))
    assert text_of(markup, said("user", "Hi"), tools=[FIND]).startswith(
        "<|im_start|>system\n# Tools"
    )


def test_the_template_named_for_tools_is_taken_with_them(folder) -> None:
    path = folder("qwen2", template="unused")
    (path / "chat_template.jinja").unlink()
    named = [
        {"name": name, "template": (TEMPLATES / file).read_text()}
        for name, file in (("default", "chatml.jinja"), ("tool_use", "qwen2.jinja"))
    ]
    config = {"eos_token": "<|im_end|>", "chat_template": named}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    markup = Markup(path)
    assert text_of(markup, said("user", "Hi")).startswith("<|im_start|>user\nHi")
    with_tools = text_of(markup, said("user", "Hi"), tools=[FIND])
    assert with_tools.startswith("<|im_start|>system\nYou help people.\n\n# Tools")


def test_messages_that_a_template_refuses_are_refused_with_its_words(family) -> None:
    with pytest.raises(RefusedError, match="user and assistant take turns") as caught:
        text_of(family("mistral"), said("assistant", "Hi"), said("user", "Hm"))
    assert caught.value.kind == "invalid"


def test_an_image_is_refused_by_a_model_that_reads_none(family) -> None:
    with pytest.raises(RefusedError, match="reads no images"):
        text_of(family("qwen2"), Message("user", (Image("0", "image/png"),)))


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(family) -> None:
    family("chatml")
    markup = Markup(family.folder("chatml"), max_context=10)
    with pytest.raises(RefusedError, match="prompt is too long") as caught:
        text_of(markup, said("user", "x" * 2000))
    assert (caught.value.kind, caught.value.limit) == ("overflow", 10)


@pytest.mark.parametrize(
    ("family_name", "begins"),
    [("qwen3", "assistant\n<think>\n\n</think>\n\n"), ("deepseek_r1", "<｜Assistant｜>")],
)
def test_a_last_message_of_an_assistant_is_gone_on_with(family, family_name, begins) -> None:
    text = text_of(family(family_name), said("user", "Hi"), said("assistant", "Dear "))
    assert text.endswith(f"{begins}Dear ")


def test_it_is_gone_on_with_behind_turns_too(family) -> None:
    before = [said("user", "Hi"), said("assistant", "Hm")]
    new = [said("user", "And?"), said("assistant", "Well, ")]
    text = text_of(family("qwen2"), *new, before=before)
    assert text == "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\nWell, "


@pytest.mark.parametrize(
    ("closed", "text"),
    [
        pytest.param(True, "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n", id="yes"),
        pytest.param(
            False, "<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n", id="no"
        ),
    ],
)
def test_a_turn_that_was_cut_off_is_ended_before_what_follows(family, closed, text) -> None:
    before = [said("user", "Hi"), said("assistant", "Hm")]
    assert text_of(family("qwen2"), said("user", "And?"), before=before, closed=closed) == text


def test_a_turn_that_was_cut_off_is_gone_on_with_when_nothing_is_new(family) -> None:
    before = [said("user", "Hi"), said("assistant", "Hm")]
    assert text_of(family("qwen2"), before=before, closed=False) == ""


def test_a_sampled_end_stays_where_the_template_writes_none(family) -> None:
    before = [said("user", "Hi"), said("assistant", "Hm")]
    text = text_of(family("unended"), said("user", "And?"), before=before)
    assert text == "\n<|user|>\nAnd?\n<|assistant|>\n"


def test_reasoning_is_left_out_where_the_client_wants_none_and_the_template_can(family) -> None:
    text = text_of(family("qwen3"), said("user", "Hi"), reasoning=False)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


class Counted(list[Message]):
    """Messages that count how often one of them is looked at."""

    looked = 0

    def __getitem__(self, place):
        self.looked += 1
        return super().__getitem__(place)

    def __iter__(self):
        self.looked += len(self)
        return super().__iter__()


def test_what_is_new_is_rendered_without_a_look_at_what_stands(family) -> None:
    before = Counted([said("user", "Hi"), said("assistant", "Hm")] * 500)
    text_of(family("qwen2"), said("user", "And?"), before=before)
    assert before.looked < 10
