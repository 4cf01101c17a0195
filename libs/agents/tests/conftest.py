"""A policy whose words a test decides, for agents of both kinds."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle_agents import ChatAgent, ChatContext
from treadle_agents.loop import Outcome, converse
from treadle_agents.record import Generate, Generated
from treadle_core.tickets import Sampling
from treadle_gateway.settings import GatewaySettings
from treadle_gateway.testing import MODEL, Scripted, serving, write_model


@dataclass(frozen=True)
class Talked:
    """What an agent's episode came to, and what the policy was asked in it."""

    outcome: Outcome
    segments: Any
    asked: list[str]


TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a chat template, and no more."""
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def talk(tmp_path: Path) -> Callable[..., Any]:
    """Has an agent talk to a policy behind a real gateway; `says` answers its prompts."""
    folder = tmp_path / "policy"
    policy = Scripted(write_model(folder))

    async def run(
        agent: ChatAgent,
        task: Mapping[str, Any],
        says: Callable[[str], str],
        *,
        max_context: int = 65536,
        **told: Any,
    ) -> Talked:
        settings = GatewaySettings(folder, MODEL, max_context, tmp_path / "gateway.log", **told)
        policy.reset()
        policy.says, policy.piece = says, 64
        sampling = Sampling(temperature=1.0, max_tokens=4096)
        async with serving(settings, policy) as world:
            access = await world.open(sampling=sampling)
            urls, token = access.urls, access.token
            context = ChatContext(
                task, urls["openai"], urls["anthropic"], token, MODEL, sampling, max_context, 60.0
            )
            outcome = await converse(agent, context)
            captured = await world.pool.end(access.session)
        ids = [call.prompt.token_ids.tolist() for call in policy.calls]
        asked = [policy.tokenizer.decode(each, skip_special_tokens=False) for each in ids]
        return Talked(outcome, captured.segments, asked)

    return run


@pytest.fixture
def speaking() -> Callable[[list[str]], Any]:
    """Makes a policy of bytes that says texts one after another (`treadle_agents.record`)."""

    def make(texts: list[str]) -> Generate:
        said = iter(texts)

        async def generate(prompt: Any, sampling: Sampling) -> Generated:
            ids = np.frombuffer(next(said).encode(), np.uint8).astype(np.int32)
            version = np.ones(ids.size, np.int32)
            return Generated(ids, np.full(ids.size, -1, np.float32), version, version, False)

        return generate

    return make
