"""What tests of a gateway stand on: a small policy's folder, what it says, and clients' requests.

Shapes: N = tokens of one piece.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from treadle_agents.record import Generated
from treadle_core.tickets import Sampling
from treadle_gateway.policy_calls import Heard
from treadle_gateway.pool import GatewayPool
from treadle_gateway.ports import Prompt
from treadle_gateway.settings import GatewaySettings
from treadle_gateway.terms import Access, SessionSpec

PATIENCE_S = 60.0
"""Seconds after which a test gives up."""
MODEL = "policy"
"""Name of the policy for clients."""

MARKUP = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Special tokens; the last ends a turn."""
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Added tokens that are text."""
IMAGE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
"""What the template writes for an image; the second is its placeholder."""

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}
{%- elif message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}{% if message.content or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}
{{- part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_model(folder: Path, *, images: bool = False) -> Tokenizer:
    """Makes a folder with a tokenizer of bytes and a template with tools; returns the tokenizer.

    With `images` it has tokens for these; without them the model reads none.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in MARKUP])
    if images:
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in IMAGE])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in TAGS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": MARKUP[2], "pad_token": MARKUP[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What the policy was asked, and what it has said to it."""

    prompt: Prompt
    sampled: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])


async def _at_once(call: Call) -> None:
    await asyncio.sleep(0)


class Scripted:
    """A policy that says what `says` makes of the text of its prompt."""

    says: Callable[[str], str]
    """The words of the turn; a stop token follows, unless `max_tokens` cuts it."""
    before: Callable[[Call], Awaitable[None]]
    """Awaited before every piece; may wait, and may raise."""
    piece: int
    """Tokens of a piece, N; 0: it says nothing at all."""
    version: int
    """Of the policy, stated with each token; may change between two pieces."""
    calls: list[Call]
    """All that was asked, in order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Greets, a token at a time."""
        self.tokenizer = tokenizer
        self.running = 0
        """Calls that are under way."""
        self.reset()

    def reset(self) -> None:
        """Forgets what was asked, and greets."""
        self.says, self.before = lambda _: "Hello.", _at_once
        self.piece, self.version = 1, 1
        self.calls = []

    async def generate(self, prompt: Prompt, heard: Heard) -> None:
        """Says its turn."""
        call = Call(prompt)
        self.calls.append(call)
        text = self.tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)
        ids = self.tokenizer.encode(self.says(text), add_special_tokens=False).ids
        ids += self.tokenizer.encode(MARKUP[2], add_special_tokens=False).ids
        told = ids[: prompt.sampling.max_tokens]
        self.running += 1
        try:
            for start in range(0, len(told) if self.piece else 0, self.piece or 1):
                await self.before(call)
                piece = told[start : start + self.piece]
                last = start + self.piece >= len(told)
                heard(self._say(call, piece, length=last and len(told) < len(ids)))
        finally:
            self.running -= 1

    def _say(self, call: Call, piece: list[int], *, length: bool) -> Generated:
        logprobs = [-0.01 * (1 + (len(call.sampled) + i) % 50) for i in range(len(piece))]
        call.sampled.extend(piece)
        call.logprobs.extend(logprobs)
        versions = np.full(len(piece), self.version, np.int32)
        return Generated(
            np.array(piece, np.int32), np.array(logprobs, np.float32), versions, versions, length
        )


@dataclass(slots=True)
class World:
    """A gateway of real workers, its policy, and a client."""

    pool: GatewayPool
    policy: Scripted
    http: aiohttp.ClientSession

    async def open(self, **changed: Any) -> Access:
        """Opens a session, with some of its terms changed."""
        spec = SessionSpec(Sampling(temperature=1.0, max_tokens=512), deadline_s=600.0)
        return await self.pool.open(replace(spec, **changed))

    async def post(
        self, access: Access, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and JSON of the answer."""
        shown = {"Authorization": f"Bearer {access.token}"} | dict(headers or {})
        url = f"{access.urls['anthropic']}{path}"
        async with self.http.post(url, json=body, headers=shown) as answer:
            return answer.status, await answer.json()

    async def chat(self, access: Access, *said: str, **fields: Any) -> tuple[int, Any]:
        """Says something over the chat wire: what a user and an assistant said in turns."""
        body = {"model": MODEL, "messages": conversation(*said)} | fields
        return await self.post(access, "/v1/chat/completions", body)


def conversation(*said: str) -> list[dict[str, str]]:
    """Messages of a user and an assistant in turns; the user begins."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]


@asynccontextmanager
async def serving(
    settings: GatewaySettings, policy: Scripted, workers: int = 1
) -> AsyncGenerator[World]:
    """A gateway while it is used."""
    pool = GatewayPool(settings, workers, policy.generate)
    await pool.start()
    running = asyncio.create_task(pool.run())
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    try:
        async with aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
        ) as http:
            yield World(pool, policy, http)
    finally:
        running.cancel()
        await asyncio.wait({running})


async def until(holds: Callable[[], bool]) -> None:
    """Waits until something holds. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110, what is waited for has no event of its own
            await asyncio.sleep(0.01)
