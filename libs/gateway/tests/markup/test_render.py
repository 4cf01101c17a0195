"""Prompt, turn and what follows, against what a template makes of the whole conversation."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from treadle_agents.chat import Template
from treadle_gateway.conversation import Message, Text, Tool, ToolCall
from treadle_gateway.markup.template import Markup

FORECAST = Tool(
    "forecast",
    "Tells the weather.",
    {"type": "object", "properties": {"town": {"type": "string"}, "days": {"type": "integer"}}},
)
WORDS = ["the weather", "in Oslo", "snow", "naïve", "日本", "🙂", "a  b", "{", "done.", "x = 1\n"]
MAPPINGS = ("qwen2", "qwen_coder", "llama3", "mistral")
"""Families whose templates want arguments as a mapping."""
TOOLED = ("qwen2", "qwen3", "qwen_coder", "llama3", "mistral", "mistral_named", "deepseek_r1")


def said(role, text: str, **more) -> Message:
    return Message(role, (Text(text),) if text else (), **more)


def plainly(messages: Sequence[Message], family: str) -> list[dict]:
    """The messages as a user of the family's template would write them."""
    put: list[dict] = []
    for each in messages:
        message: dict = {"role": each.role, "content": each.text}
        if each.reasoning:
            message["reasoning_content"] = each.reasoning
        if each.calls:
            message["tool_calls"] = [
                {
                    "id": call.id[-9:],
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.loads(call.arguments)
                        if family in MAPPINGS
                        else call.arguments,
                    },
                }
                for call in each.calls
            ]
        if each.role == "tool":
            message["tool_call_id"] = each.call_id[-9:]
        put.append(message)
    return put


class Reference:
    """Template and tokenizer of a folder, used as everybody does."""

    def __init__(self, folder: Path, family: str) -> None:
        self._family = family
        self._template = Template(folder)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), **more) -> str:
        defined = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": dict(tool.parameters),
                },
            }
            for tool in tools
        ]
        return self._template.render(plainly(messages, self._family), tools=defined, **more)

    def ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


class Talk:
    """A conversation that a random client and a random policy have."""

    def __init__(self, seed: int, family: str, *, tools: bool, thinks: bool) -> None:
        self._random = Random(seed)  # noqa: S311
        self._family = family
        self._tools = tools
        self._thinks = thinks
        self._calls = 0

    def words(self) -> str:
        return " ".join(self._random.choices(WORDS, k=self._random.randint(1, 6))).strip()

    def turn(self) -> Message:
        """What the policy says, and thinks before."""
        reasoning = self.words() if self._thinks else ""
        if not self._tools or self._random.random() < 0.4:
            return said("assistant", self.words(), reasoning=reasoning)
        calls: list[ToolCall] = []
        most = 1 if self._family == "llama3" else 2
        for _ in range(self._random.randint(1, most)):
            self._calls += 1
            arguments = json.dumps({"town": self.words(), "days": self._calls}, ensure_ascii=False)
            calls.append(ToolCall(f"call0{self._calls:04}", "forecast", arguments))
        return said("assistant", "", reasoning=reasoning, calls=tuple(calls))

    def answer(self, turn: Message) -> list[Message]:
        if turn.calls:
            return [said("tool", self.words(), call_id=call.id) for call in turn.calls]
        return [said("user", self.words())]


def lead(family: str) -> list[Message]:
    return [] if family in ("gemma", "mistral") else [said("system", "Be brief.")]


@pytest.fixture(scope="module")
def references(family) -> Callable[[str], Reference]:
    @cache
    def read(name: str) -> Reference:
        family(name)
        return Reference(family.folder(name), name)

    return read


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("family_name", "tools", "thinks"),
    [
        *((each, False, False) for each in ("chatml", "gemma", "vision", "mistral")),
        *((each, True, False) for each in TOOLED if each != "deepseek_r1"),
        ("qwen3", True, True),
        ("qwen3", False, True),
        ("deepseek_r1", True, True),
    ],
)
def test_prompt_turn_and_what_follows_are_the_whole_render_or_do_not_stand(
    family, references, family_name: str, tools: bool, thinks: bool, seed: int
) -> None:
    markup: Markup = family(family_name)
    reference = references(family_name)
    defined = [FORECAST] if tools else []
    talk = Talk(seed, family_name, tools=tools, thinks=thinks)
    before: list[Message] = []
    new = [*lead(family_name), said("user", talk.words())]
    path: list[int] = []  # the tokens so far
    turns: list[tuple[int, list[int]]] = []  # messages and tokens up to each
    for _ in range(6):
        stands = markup.stands(before, new, tools=tools)
        if stands < len(before):
            turns = [turn for turn in turns if turn[0] <= stands]
            depth, path = turns[-1] if turns else (0, [])
            conversation = [*before, *new]
            path, before, new = list(path), conversation[:depth], conversation[depth:]
        path += markup.render(before, new, tools=defined).tolist()
        conversation = [*before, *new]
        prompt = reference.text(conversation, defined)
        assert markup.decode(path) == prompt
        assert path == reference.ids(prompt)

        turn = talk.turn()
        sampled = spoken(reference, conversation, turn, defined, prompt)
        path += reference.ids(sampled)
        before, new = [*conversation, turn], talk.answer(turn)
        turns.append((len(before), list(path)))


def spoken(
    reference: Reference,
    conversation: Sequence[Message],
    turn: Message,
    tools: Sequence[Tool],
    prompt: str,
) -> str:
    """What a policy says that was trained with the template, its end of turn included."""
    end = reference._template.ends[0]
    whole = reference.text([*conversation, turn], tools, opens=False)
    if not whole.startswith(prompt):  # the prompt opens a block that the template drops
        return f"{turn.reasoning}\n</think>\n\n{turn.text}{end}"
    return whole[len(prompt) :].partition(end)[0] + end


@pytest.mark.parametrize(
    ("family_name", "follows", "stands"),
    [
        pytest.param("qwen2", "user", 3, id="all-is-kept"),
        pytest.param("qwen3", "tool", 3, id="thoughts-are-kept-while-it-works"),
        pytest.param("qwen3", "user", 0, id="thoughts-are-dropped-when-asked-again"),
        pytest.param("deepseek_r1", "tool", 0, id="thoughts-are-always-dropped"),
        pytest.param("mistral", "user", 0, id="tools-and-system-move"),
        pytest.param("gemma", "user", 3, id="a-system-message-that-leads-the-question"),
    ],
)
def test_what_stands_is_what_the_template_keeps(family, family_name, follows, stands) -> None:
    call = ToolCall("call00001", "forecast", "{}")
    calls = (call,) if follows == "tool" else ()
    turn = said("assistant", "" if calls else "Snow.", reasoning="Hm.", calls=calls)
    before = [said("system", "Be brief."), said("user", "Weather?"), turn]
    new = [said(follows, "Fine", call_id="call00001" if follows == "tool" else "")]
    assert family(family_name).stands(before, new) == stands


def test_nothing_stands_where_what_is_new_depends_on_more_than_the_last_turn(folder) -> None:
    numbered = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.index }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant "
        "{{ messages | length + 1 }}\n{% endif %}"
    )
    markup = Markup(folder("chatml", template=numbered))
    before = [said("user", "Weather?"), said("assistant", "Snow.")]
    new = [said("user", "And then?")]
    assert markup.stands(before, new, tools=False) == 0
    whole = markup.decode(markup.render((), [*before, *new], tools=()))
    assert whole.endswith("user 3\nAnd then?<|im_end|>\n<|im_start|>assistant 4\n")
