"""What is said in the bench: chats that grow, replies that name what they answer, and their pace.

A token is a character of text, or a marker: the tokenizer is that of `treadle_gateway.testing`.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

TOKENS = 32
"""Of a reply: words, padded to one length, and the token that ends the turn."""
FIRST_S, EACH_S = 0.050, 0.005
"""Seconds to the first token, and to each that follows."""

SYSTEM = "You are a careful agent, and you work on a repository with many modules. " * 4
_FILL = "The last command printed this: line 17 of module 4 differs; say what to do next. "
_NAME = re.compile(r"#(\w+\.\d+)#")
_MARKER = re.compile(r"<\|im_\w+\|>")


def answer_to(prompt: str) -> str:
    """What the policy says to the end of a prompt: it names the turn that is asked."""
    names = _NAME.findall(prompt)
    return f"I have done {names[-1] if names else 'nothing'}".ljust(TOKENS - 1, ".")


async def paced(*, at_once: bool) -> AsyncIterator[int]:
    """The number of each token, when it is due."""
    loop = asyncio.get_running_loop()
    since = loop.time()
    for number in range(TOKENS):
        due = since + FIRST_S + number * EACH_S
        await asyncio.sleep(0 if at_once else max(0.0, due - loop.time()))
        yield number


@dataclass(slots=True)
class Chat:
    """A conversation, from its client's side."""

    name: str
    """Letters and digits; of no other chat."""
    growth: int
    """Characters that a user's message has at least."""
    messages: list[dict[str, str]] = field(init=False)
    turns: int = field(default=0, init=False)
    new_tokens: int = field(default=0, init=False)
    """That the question adds to those that stand, with the markup around it."""

    def __post_init__(self) -> None:
        """Begins with the system prompt."""
        self.messages = [{"role": "system", "content": SYSTEM}]

    def ask(self) -> None:
        """The user says something."""
        filled = _FILL * (self.growth // len(_FILL) + 1)
        said = f"{filled[: self.growth]} #{self.name}.{self.turns}#"
        self.messages.append({"role": "user", "content": said})
        before = "\n" if self.turns else _written(self.messages[:1])
        added = f"{before}{_written(self.messages[-1:])}<|im_start|>assistant\n"
        self.new_tokens = len(_MARKER.sub("|", added))

    def hear(self, text: str) -> None:
        """The policy answered. Raises ValueError where that is not the reply to this turn."""
        expected = answer_to(self.messages[-1]["content"])
        if text != expected:
            raise ValueError(f"expected {expected!r}, got {text!r}")
        self.messages.append({"role": "assistant", "content": text})
        self.turns += 1

    @property
    def transcript(self) -> str:
        """The whole of it as the template writes it, up to the token that ended the last turn."""
        return _written(self.messages).removesuffix("\n")

    @property
    def sampled(self) -> str:
        """What of it the policy said, with the tokens that ended its turns."""
        said = (each["content"] for each in self.messages if each["role"] == "assistant")
        return "".join(f"{text}<|im_end|>" for text in said)


def _written(messages: Sequence[Mapping[str, str]]) -> str:
    said = ((each["role"], each["content"]) for each in messages)
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in said)
