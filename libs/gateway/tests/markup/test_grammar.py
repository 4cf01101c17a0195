"""What a reply must be where a tool is to be called: followed as an engine follows it."""

import json
from random import Random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from treadle_gateway.conversation import Message, Text, Tool, ToolCall, ToolChoice
from treadle_gateway.markup.template import Markup

llguidance: Any = pytest.importorskip("llguidance")

FIND = Tool(
    "find",
    "",
    {
        "type": "object",
        "properties": {
            "what": {"type": "string"},
            "most": {"type": "integer"},
            "how": {"type": "string", "enum": ["fast", "slow"]},
        },
        "required": ["what"],
        "additionalProperties": False,
    },
)
SEND = Tool(
    "send",
    "",
    {
        "type": "object",
        "properties": {"to": {"anyOf": [{"$ref": "#/$defs/somebody"}, {"type": "null"}]}},
        "$defs": {"somebody": {"enum": ["x", "y"]}},
        "required": ["to"],
        "additionalProperties": False,
    },
    namespace="mail",
)
TOOLS = [FIND, SEND]
REQUIRED = ToolChoice("required")
ENDS = {"qwen2": "<|im_end|>", "qwen3": "<|im_end|>", "qwen_coder": "<|im_end|>"}
ENDS |= {"llama3": "<|eot_id|>", "mistral": "</s>", "mistral_named": "</s>"}
ENDS |= {"deepseek_r1": "<｜end▁of▁sentence｜>", "gemma": "<end_of_turn>"}
MANY = 3


class Followed:
    """The tokens that a grammar allows, in the vocabulary of a family."""

    def __init__(self, family, name: str) -> None:
        self.markup: Markup = family(name)
        text = (family.folder(name) / "tokenizer.json").read_text()
        self.tokenizer = Tokenizer.from_str(text)
        self.size = self.tokenizer.get_vocab_size()
        self.end = self.tokenizer.token_to_id(ENDS[name])
        self._tokens = llguidance.LLTokenizer(text, self.size, [self.end])
        self._closing = np.array(
            [any(c in '">}]' for c in self.tokenizer.id_to_token(i)) for i in range(self.size)]
        )

    def follow(self, **asked: Any) -> Any:
        grammar = self.markup.grammar(**{"tools": TOOLS, "choice": REQUIRED, **asked})
        lark = llguidance.LLMatcher.grammar_from_lark(grammar)
        matcher = llguidance.LLMatcher(self._tokens, lark, log_level=0)
        assert matcher.get_error() == ""
        return matcher

    def allowed(self, matcher: Any) -> np.ndarray:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self.size, bitorder="little").astype(bool)

    def takes(self, text: str, **asked: Any) -> bool:
        """The text is a whole reply."""
        matcher = self.follow(**asked)
        for token in self.tokenizer.encode(text, add_special_tokens=False).ids:
            if not self.allowed(matcher)[token]:
                return False
            matcher.consume_token(token)
        return bool(self.allowed(matcher)[self.end])

    def say(self, random: Random, **asked: Any) -> list[int] | None:
        """A reply at random that soon comes to its end; None where it does not."""
        matcher, said = self.follow(**asked), list[int]()
        for size in range(120):
            allowed = self.allowed(matcher)
            if allowed[self.end]:
                return said
            soon = allowed & self._closing if size > 6 else allowed
            token = random.choice(np.flatnonzero(soon if soon.any() else allowed).tolist())
            said.append(token)
            matcher.consume_token(token)
        return None


@pytest.fixture(scope="module")
def followed(family):
    known: dict[str, Followed] = {}
    return lambda name: known.setdefault(name, known.get(name) or Followed(family, name))


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize(
    "choice",
    [
        pytest.param(REQUIRED, id="any"),
        pytest.param(ToolChoice("required", ("send",), parallel=False), id="one"),
    ],
)
def test_whatever_is_sampled_is_a_call(followed, name: str, choice: ToolChoice) -> None:
    model, random, whole = followed(name), Random(name), 0  # noqa: S311
    for _ in range(MANY):
        said = model.say(random, choice=choice, reasoning=True)
        if said is None:
            continue
        whole += 1
        reader = model.markup.reader(
            tools=TOOLS, reasoning=True, stop=(), choice=choice, new_id=lambda: "call"
        )
        reader.feed(said)
        _, message, finish = reader.finish(length=False)
        assert (finish, message.text) == ("calls", "")
        assert len(message.calls) == 1 or choice.parallel
        for call in message.calls:
            assert call.name in (choice.names or ("find", "send"))
            obeys(json.loads(call.arguments), call)
    assert whole


def obeys(arguments: dict[str, Any], call: ToolCall) -> None:
    if call.name == "send":
        assert call.namespace == "mail"
        assert arguments in ({"to": "x"}, {"to": "y"}, {"to": None})
        return
    assert isinstance(arguments.pop("what"), str)
    assert isinstance(arguments.pop("most", 0), int)
    assert arguments.pop("how", "fast") in ("fast", "slow")
    assert arguments == {}


@pytest.mark.parametrize("name", ENDS)
def test_a_call_as_the_template_writes_it_is_one(followed, name: str) -> None:
    model = followed(name)
    question = Message("user", (Text("Where?"),))
    written = '{"what": "a \\"b\\"", "most": 3}'
    turn = Message("assistant", calls=(ToolCall("call00000", "find", written),))
    answer = Message("tool", (Text("There."),), call_id="call00000")
    prompt, whole = (
        model.markup.decode(model.markup.render((), told, tools=TOOLS, reasoning=False))
        for told in ([question], [question, turn, answer])
    )
    # Some prompts end with an empty thought, which is not written before a call.
    opens = model.markup.probe.calls.opens
    said = opens + whole.rpartition(opens)[2] if opens in whole else whole.removeprefix(prompt)
    said = said.partition(ENDS[name])[0].strip()
    if model.markup.probe.thinks_unasked:
        said = f"</think>\n\n{said}"
    assert model.takes(said, reasoning=False)
    assert not model.takes(said, reasoning=False, choice=ToolChoice("required", ("send",)))
    assert not model.takes("Here.", reasoning=False)
    assert not model.takes(f"{said} Here.", reasoning=False)


def test_thoughts_may_stand_before_a_call_where_the_policy_has_such(followed) -> None:
    call = '<tool_call>\n{"name": "find", "arguments": {"what": ""}}\n</tool_call>'
    thinks = followed("qwen3")
    assert thinks.takes(f"<think>\nHm.\n</think>\n\n{call}", reasoning=True)
    assert thinks.takes(call, reasoning=True)
    assert not thinks.takes(f"<think>\nHm.\n</think>\n\n{call}", reasoning=False)
    assert not thinks.takes("<think>\nHm.\n</think>\n\nHere.", reasoning=True)
    assert not followed("qwen2").takes(f"<think>\nHm.\n</think>\n\n{call}", reasoning=True)


def test_several_calls_are_one_reply_only_where_they_are_welcome(followed) -> None:
    call = '<tool_call>\n{"name": "find", "arguments": {"what": ""}}\n</tool_call>'
    model = followed("qwen2")
    assert model.takes(f"{call}\n{call}", reasoning=True)
    alone = ToolChoice("required", parallel=False)
    assert not model.takes(f"{call}\n{call}", reasoning=True, choice=alone)
    assert model.takes(call, reasoning=True, choice=alone)


@pytest.mark.parametrize(
    "choice", [ToolChoice(), ToolChoice("none"), ToolChoice("auto", ("find",), parallel=False)]
)
def test_a_policy_that_may_also_call_nothing_says_what_it_likes(family, choice) -> None:
    assert family("qwen2").grammar(tools=TOOLS, choice=choice, reasoning=True) == ""
