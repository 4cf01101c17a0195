"""Every example of an agent, as its recipe names it, with a policy that follows a script."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from treadle_cli.compose import compose, read_recipe
from treadle_core.episodes import Segment, Termination
from treadle_core.tickets import Sampling, Ticket
from treadle_rollout.adapters.script import Asked
from treadle_rollout.adapters.scripted import ScriptedEngine
from treadle_rollout.config import RolloutConfig
from treadle_rollout.players import Played
from treadle_rollout.wiring import Cast, agents_of, cast_of
from treadle_rollout.words import raw

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "examples" / "agents"
POLICY = ROOT / "examples" / "calculator" / "policy"
RUN_TOKEN = "run-token-of-this-test"  # noqa: S105, good for nothing
PATIENCE_S = 120.0
SAID = re.compile(r"<\|(\w+)\|>(.*?)<\|end\|>")
"""What was said by whom, in the policy's markup."""


def calls(asked: Asked) -> str:
    """Has the calculator do one operation after the other, and answers with the last result."""
    question, *rest = _conversation(asked)
    terms = re.findall(r"[+-]?\d+", question)
    results = [said for role, said in rest if role == "tool"]
    if len(results) + 1 == len(terms):
        return f"<answer>{results[-1] if results else terms[0]}<|end|>"
    return f"<call>{results[-1] if results else terms[0]}{terms[len(results) + 1]}<|end|>"


def _conversation(asked: Asked) -> Any:
    said = SAID.findall(asked.text)
    last = max(i for i, (role, _) in enumerate(said) if role == "user")
    return [said[last][1], *said[last + 1 :]]


def answers(asked: Asked) -> str:
    """Does two terms in the head; of more it has the first two done."""
    question, *_ = _conversation(asked)
    terms = re.findall(r"[+-]?\d+", question)
    return f"<answer>{sum(map(int, terms))}<|end|>" if len(terms) == 2 else calls(asked)


@asynccontextmanager
async def staged(
    folder: Path, overlay: str, *overrides: str, script: Callable[[Asked], str] = calls
) -> AsyncIterator[Cast]:
    """Who plays the agent of a recipe, with everything real but the policy."""
    recipe = read_recipe(
        ROOT / "recipes" / "calculator.yaml",
        overlays=[AGENTS / overlay],
        overrides=[f"run.dir={folder}", "rollout.slots=2", *overrides],
    )
    cfg = RolloutConfig.model_validate(compose(recipe).services["rollout"])
    engine = ScriptedEngine(
        model=POLICY,
        max_context=cfg.engine.parameters["max_context"],
        script=script,
        stop_tokens=("<|end|>",),
        weightless=True,
    )
    await engine.install(1)
    cast = await cast_of(cfg, await agents_of(cfg), engine, lambda _: None)
    running = [asyncio.create_task(each.run()) for each in cast.supervised]
    try:
        yield cast
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await engine.close()


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name files from here; an agent's files lie in them by name."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TREADLE_RUN_TOKEN", RUN_TOKEN)


def ticket(expression: str, answer: int, episode: str = "e") -> Ticket:
    prompt = f"<|user|>{expression}<|end|><|assistant|>"
    task = {"prompt": prompt, "expression": expression, "answer": answer}
    return Ticket(episode, 1, "t", 0, task, Sampling(temperature=1.0, max_tokens=14), PATIENCE_S)


def texts(segment: Segment) -> tuple[str, str]:
    """All of a segment, and what of it is trained."""
    words = raw(str(POLICY / "tokenizer.json"))
    ids = segment.token_ids
    trained = ids[segment.trained]
    return tuple(
        words.decode(part.tolist(), skip_special_tokens=False).replace(" ", "")
        for part in (ids, trained)
    )


WHOLE = (
    "<|user|>47+38-62<|end|><|assistant|><call>47+38<|end|><|tool|>85<|end|>"
    "<|assistant|><call>85-62<|end|><|tool|>23<|end|><|assistant|><answer>23<|end|>"
)
SPOKEN = "<call>47+38<|end|><call>85-62<|end|><answer>23<|end|>"


@pytest.mark.parametrize("overlay", ["env.yaml", "chat.yaml", "command.yaml", "command_sh.yaml"])
async def test_each_way_of_writing_it_is_captured_alike(tmp_path: Path, overlay: str) -> None:
    async with staged(tmp_path, overlay) as cast, asyncio.timeout(PATIENCE_S):
        right, wrong = await asyncio.gather(
            cast.player.play(ticket("47+38-62", 23)),
            cast.player.play(ticket("47+38-62", 24, "another")),
        )
    assert (right.outcome.reward, wrong.outcome.reward) == (1, 0)
    assert right.outcome.termination is Termination.FINISHED
    (segment,) = right.segments
    assert texts(segment) == (WHOLE, SPOKEN)


async def test_a_client_takes_episodes_and_says_their_worth(tmp_path: Path) -> None:
    program = str(AGENTS / "external.py")
    staging = staged(tmp_path, "external.yaml", "rollout.gateway.port=0", script=answers)
    async with staging as cast, asyncio.timeout(PATIENCE_S):
        assert cast.sessions is not None
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            program,
            "2",
            env={"TREADLE_GATEWAY": cast.sessions.urls[0], "TREADLE_RUN_TOKEN": RUN_TOKEN},
        )
        right = await cast.player.play(ticket("47+38", 85))
        wrong = await cast.player.play(ticket("47+38", 86, "another"))
        assert await client.wait() == 0
    assert (right.outcome.reward, wrong.outcome.reward) == (1, 0)
    (segment,) = right.segments
    assert texts(segment) == (
        "<|user|>47+38<|end|><|assistant|><answer>85<|end|>",
        "<answer>85<|end|>",
    )


async def test_a_planner_and_a_solver_are_two_branches_of_a_session(tmp_path: Path) -> None:
    played = await _played(tmp_path, "two_agents.yaml", ticket("47+38-62", 23), answers)
    assert (played.outcome.reward, played.outcome.metrics) == (1, {"parts": 2})
    planner, solver = sorted(
        map(texts, played.segments), key=lambda pair: "47+38-62" not in pair[0]
    )
    assert planner == (WHOLE, SPOKEN)
    assert solver == (
        "<|user|>47+38<|end|><|assistant|><answer>85<|end|>"
        "<|user|>85-62<|end|><|assistant|><answer>23<|end|>",
        "<answer>85<|end|><answer>23<|end|>",
    )


async def test_a_compaction_begins_a_second_path_and_both_are_trained(tmp_path: Path) -> None:
    played = await _played(tmp_path, "compaction.yaml", ticket("47+38-62+10", 33), calls)
    assert (played.outcome.reward, played.outcome.metrics) == (1, {"compactions": 1})
    before, after = sorted(
        map(texts, played.segments), key=lambda pair: "47+38-62+10" not in pair[0]
    )
    assert before[0].startswith("<|user|>47+38-62+10<|end|><|assistant|><call>47+38<|end|>")
    assert after[0].startswith("<|user|>23+10<|end|><|assistant|>")
    assert before[1] + after[1] == (
        "<call>47+38<|end|><call>85-62<|end|><call>23+10<|end|><answer>33<|end|>"
    )
    assert played.counts["paths.compaction"] == 1


async def _played(
    folder: Path, overlay: str, ticket: Ticket, script: Callable[[Asked], str]
) -> Played:
    async with staged(folder, overlay, script=script) as cast, asyncio.timeout(PATIENCE_S):
        return await cast.player.play(ticket)


@pytest.mark.parametrize("name", ["env.py", "chat.py", "command.py", "command.sh", "external.py"])
def test_a_simple_agent_has_twenty_lines(name: str) -> None:
    text = (AGENTS / name).read_text()
    bare = re.sub(r'"""(?s:.*?)"""', "", text).splitlines()
    lines = [line for line in bare if line.strip() and not line.lstrip().startswith("#")]
    assert len(lines) <= 20
