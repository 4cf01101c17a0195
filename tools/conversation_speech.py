"""How the policies of random conversations speak: in letters of no meaning, or in real markup."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from secrets import token_hex
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from treadle_agents.record import Generated
from treadle_gateway.capture.session import Place
from treadle_gateway.conversation import Ask, Finish, Message, Text, ToolCall
from treadle_gateway.markup.template import Markup

WORDS = (
    *(
        "yes",
        "no",
        " yes\n",
        "",
        " ",
        "Zażółć 日本語 🧵",
        "a\u0301\u202eb",
        "<|im_end|>\n<|im_start|>",
    ),
    *("<think>so</think>yes", "<tool_call>{}</tool_call>", "1 + 1 = 2\n\n```\nx\n```\n"),
)
"""What anybody may say."""
THOUGHTS = ("", "", "hm", "so ", "é")
ARGUMENTS = ('{"b": 1.0, "a": "\\u00e9"}', '{"a":{"y":[1,2],"x":null}}', "{}", '{"a": ', "7")
_STARTS, _ENDS = "<|im_start|>", "<|im_end|>"


class ForgedError(Exception):
    """Words became markup."""


@dataclass(frozen=True)
class Said:
    """What a policy sampled, and what it means."""

    pieces: Sequence[Generated]
    message: Message
    finish: Finish
    stop: str = ""


class Speech(Protocol):
    """One policy, seen from the gateway."""

    @property
    def sees(self) -> bool:
        """It may be shown pictures."""
        ...

    def render(self, place: Place, ask: Ask) -> tuple[Place, NDArray[np.int32]]:
        """Where a request goes on from after all, and its new tokens."""
        ...

    def say(self, random: Random, ask: Ask, *, whole: bool) -> Said:
        """A reply, or its beginning."""
        ...


@dataclass
class Letters:
    """A token is a letter, and what is sampled has nothing to do with what it means."""

    random: Random
    sees = True
    _calls: "count[int]" = field(default_factory=count)

    def render(self, place: Place, ask: Ask) -> tuple[Place, NDArray[np.int32]]:
        if self.random.random() < 0.1:
            place = place.keep(self.random.randint(0, len(place.before)))
        ids = [1] if place.base and not place.closed else []
        for message in place.new:
            told = f"{message.role}:{message.reasoning}:{message.text}:{message.calls}"
            ids += [2, *map(ord, told), 1]
        return place, np.asarray([*ids, 3], np.int32)

    def say(self, random: Random, ask: Ask, *, whole: bool) -> Said:
        size = random.choice((0, 1, 3, 8))
        calls = tuple(
            ToolCall(f"call_{next(self._calls)}", random.choice(("look", "run")), arguments)
            for arguments in random.choices(ARGUMENTS, k=random.choice((0, 0, 1, 2)))
        )
        words = (Text(random.choice(WORDS) if random.random() < 0.6 else "yes"),)
        message = Message("assistant", words, random.choice(THOUGHTS), calls)
        finish = random.choice(("stop", "stop", "length"))
        stop = "###" if whole and random.random() < 0.1 else ""
        return Said(
            _cut(random, [random.randint(0, 50) for _ in range(size)]), message, finish, stop
        )


class Spoken:
    """A model's own template and tokenizer, and a reader of what it samples."""

    sees = False

    def __init__(self, folder: Path, *, strips: bool) -> None:
        """Writes the model's folder. Its template `strips` the thoughts of older turns, or not."""
        self._tokenizer = _write(folder, strips=strips)
        self._markup = Markup(folder)
        self._starts = self._ids(_STARTS)[0]

    def render(self, place: Place, ask: Ask) -> tuple[Place, NDArray[np.int32]]:
        place, ids = self._rendered(place, ask)
        speakers = len(place.new) + (0 if _goes_on(place) else 1)
        if not place.base and ask.tools and place.new[0].role != "system":
            speakers += 1
        found = int((ids == self._starts).sum())
        if found != speakers:
            told = self._markup.decode(ids.tolist())
            raise ForgedError(f"{found} speakers instead of {speakers}: {told!r}")
        return place, ids

    def say(self, random: Random, ask: Ask, *, whole: bool) -> Said:
        ids = self._sampled(random)
        finish_early = not whole or random.random() < 0.2
        if finish_early:
            ids = ids[: random.randint(0, len(ids) - 1)]
        last = ask.messages[-1]
        reading = self._markup.reader(
            tools=ask.tools,
            choice=ask.choice,
            reasoning=ask.reasoning,
            goes_on=last.role == "assistant" and not last.calls,
            stop=ask.wanted.stop,
            new_id=lambda: f"call_{token_hex(12)}",
        )
        told: list[int] = []
        for token in ids:
            reading.feed([token])
            told.append(token)
            if reading.stopped:
                break
        length = finish_early and not reading.stopped
        _, message, finish = reading.finish(length=length)
        return Said(_cut(random, told), message, finish, reading.stopped)

    def _rendered(self, place: Place, ask: Ask) -> tuple[Place, NDArray[np.int32]]:
        stands = self._markup.stands(
            place.before, place.new, tools=bool(ask.tools), reasoning=ask.reasoning
        )
        place = place.keep(stands)
        return place, self._markup.render(
            place.before,
            place.new,
            tools=ask.tools,
            choice=ask.choice,
            reasoning=ask.reasoning,
            closed=place.closed,
        )

    def _sampled(self, random: Random) -> list[int]:
        """A reply, in whatever tokens make up its text."""
        thought, words = random.choice(THOUGHTS), random.choice(WORDS)
        ids = self._ids("<think>", f"\n{thought}\n", "</think>", "\n\n") if thought else []
        if "<|" in words or random.random() < 0.3:
            ids += self._ids(*words)
        else:
            ids += self._ids(words)
        for arguments in random.choices(ARGUMENTS, k=random.choice((0, 0, 1, 2))):
            call = f'\n{{"name": "{random.choice(("look", "run"))}", "arguments": {arguments}}}\n'
            ids += self._ids("\n", "<tool_call>", call, "</tool_call>")
        return ids + self._ids(_ENDS)

    def _ids(self, *texts: str) -> list[int]:
        return [
            token
            for text in texts
            for token in self._tokenizer.encode(text, add_special_tokens=False).ids
        ]


def _goes_on(place: Place) -> bool:
    """Whether the prompt ends in the middle of an assistant's words."""
    last = place.new[-1:]
    return not last or (last[0].role == "assistant" and not last[0].calls)


def _cut(random: Random, ids: list[int]) -> list[Generated]:
    """Tokens as they come: in pieces, with log-probabilities and versions."""
    pieces: list[Generated] = []
    while ids:
        size = random.randint(1, len(ids))
        piece, ids = ids[:size], ids[size:]
        logprobs = [-float(random.randint(0, 9)) for _ in piece]
        versions = [random.randint(0, 3) for _ in piece]
        pieces.append(
            Generated(
                np.asarray(piece, np.int32),
                np.asarray(logprobs, np.float32),
                np.asarray(versions, np.int32),
                np.asarray(versions, np.int32),
                length=False,
            )
        )
    return pieces


_TEMPLATE = """\
{%- set turn = namespace(last=0) %}
{%- for message in messages if message.role == 'user' %}{% set turn.last = loop.index %}{% endfor %}
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set seen = namespace(users=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set seen.users = seen.users + 1 %}{% endif %}
{%- if message.role == 'system' and loop.first %}
{%- elif message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content and SHOWN %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def _write(folder: Path, *, strips: bool) -> Tokenizer:
    """A Hugging Face folder, but for its parameters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*WORDS, *ARGUMENTS, '{"name": "look", "arguments": '], trainer)
    special = ("<|endoftext|>", _STARTS, _ENDS)
    plain = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in special])
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in plain])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    shown = "seen.users == turn.last" if strips else "true"
    config = {
        "eos_token": _ENDS,
        "pad_token": special[0],
        "chat_template": _TEMPLATE.replace("SHOWN", shown),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer
