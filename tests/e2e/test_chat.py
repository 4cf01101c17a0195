"""A policy is trained by an agent that talks to it over HTTP, with nothing but a client."""

import json
from pathlib import Path

import pytest
from e2e_harness import treadle

pytestmark = pytest.mark.e2e

QUICK = (
    "experience.steps=3",
    "experience.tasks_per_step=4",
    "experience.max_lag=0",
    "experience.evaluation=null",
    "rollout.slots=16",
    "rollout.agent.name=talking.py:Guessing",
)
AGENT = '''
"""Asks twice, and prefers some first letters to others, so that there is something to learn."""

import json
import urllib.request

from treadle_agents import ChatAgent, ChatContext, Result


class Guessing(ChatAgent):
    def run(self, context: ChatContext) -> Result:
        messages = context.messages
        messages += [ask(context, messages), {"role": "user", "content": "more"}]
        said = ask(context, messages)["content"] or "?"
        return Result(reward=ord(said[0]) % 5)


def ask(context: ChatContext, messages: list) -> dict:
    request = urllib.request.Request(
        f"{context.base_url}/chat/completions",
        json.dumps({"model": context.model, "messages": messages}).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {context.api_key}"},
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]
'''


def test_a_chat_agent_trains_a_policy_on_what_it_sampled_token_for_token(tmp_path: Path) -> None:
    project = tmp_path / "mine"
    treadle("new", str(project))
    treadle("sft", "warmup.yaml", "steps=1", cwd=project)
    (project / "talking.py").write_text(AGENT)

    treadle("train", "recipe.yaml", *QUICK, cwd=project)

    def rows(service: str, name: str) -> list[dict[str, float]]:
        lines = (project / f"runs/first/metrics/{service}.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["name"] == name]

    steps = rows("trainer", "step")
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["num_episodes"] == 4 * 8 for row in steps)
    # On policy the trainer's own forward gives each token the probability that the engine stated.
    assert all(row["trained_tokens"] > 0 and abs(row["kl"]) < 1e-6 for row in steps)
    assert all(abs(row["ratio"] - 1) < 1e-3 for row in steps)
    last = rows("rollout", "rollout")[-1]
    assert last["gateway_turns"] == last["gateway_requests"] >= last["attempts_completed"]
    assert not [name for name in last if name.startswith("gateway_untrained")]
