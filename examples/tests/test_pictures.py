"""Pictures from a task to the record of its episode, with everything real but the policy."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from treadle_agents.images.picture import Picture
from treadle_agents.record import Generated
from treadle_cli.compose import compose, read_recipe
from treadle_core.episodes import Segment
from treadle_core.tickets import Sampling, Ticket
from treadle_payloads.codec import decode_payload
from treadle_payloads.files import FileStore
from treadle_rollout.adapters.memory_experience import MemoryExperience
from treadle_rollout.adapters.scripted import ScriptedEngine
from treadle_rollout.attempts import AttemptRunner, AttemptSettings
from treadle_rollout.config import RolloutConfig
from treadle_rollout.ports import GenerationRequest, Heard
from treadle_rollout.wiring import agents_of, cast_of
from treadle_rollout.words import raw
from treadle_runtime import plugins

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "examples" / "pictures"
PATIENCE_S = 120.0


class Listening(ScriptedEngine):
    """Keeps what it was asked and what it said."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.turns: list[tuple[GenerationRequest, Generated]] = []

    async def generate(self, request: GenerationRequest, heard: Heard | None = None) -> Generated:
        made = await super().generate(request, heard)
        self.turns.append((request, made))
        return made


@dataclass
class Stage:
    engine: Listening
    experience: MemoryExperience
    runner: AttemptRunner
    stored: Path

    async def run(self, *tickets: Ticket) -> list[str]:
        for each in tickets:  # as if leased
            self.experience._leased[each.episode_id] = each
        async with asyncio.timeout(PATIENCE_S):
            return list(await asyncio.gather(*map(self.runner.run, tickets)))

    def segment(self, episode: str) -> Segment:
        inline = self.experience.results[episode].inline
        assert inline is not None
        (segment,) = decode_payload(inline)
        return segment


@asynccontextmanager
async def staged(folder: Path, agent: str) -> AsyncIterator[Stage]:
    """The rollout of the recipe, with this agent."""
    overrides = [f"run.dir={folder}", f"rollout.agent.name=examples/pictures/{agent}"]
    recipe = read_recipe(PICTURES / "recipe.yaml", overlays=[], overrides=overrides)
    cfg = RolloutConfig.model_validate(compose(recipe).services["rollout"])
    engine = Listening(model=cfg.run.model, **cfg.engine.parameters)
    await engine.install(1)
    cast = await cast_of(cfg, await agents_of(cfg), engine, lambda _: None)
    experience, stored = MemoryExperience([]), folder / "payloads"
    runner = AttemptRunner(AttemptSettings("run"), experience, cast.player, FileStore(stored))
    running = [asyncio.create_task(each.run()) for each in cast.supervised]
    try:
        yield Stage(engine, experience, runner, stored)
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await engine.close()


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name files from here."""
    monkeypatch.chdir(ROOT)


def group(cursor: int, size: int) -> list[Ticket]:
    """Tickets of one task."""
    task = plugins.load("treadle.none", f"{PICTURES / 'boards.py'}:Boards")().read(cursor)
    sampling = Sampling(temperature=1.0, max_tokens=8)
    return [Ticket(f"e{i}", 1, "t", i, task, sampling, PATIENCE_S) for i in range(size)]


AGENTS = ["counting.py:Counting", "counting_chat.py:CountingChat"]


@pytest.mark.parametrize("agent", AGENTS, ids=["env", "chat"])
async def test_what_is_recorded_is_what_the_engine_was_shown_and_said(
    tmp_path: Path, agent: str
) -> None:
    # Six squares: the script counts five of them from afar, and is shown them again.
    tickets = group(1, 4)
    async with staged(tmp_path, agent) as stage:
        assert await stage.run(*tickets) == ["completed"] * 4
    pad = raw(str(PICTURES / "policy" / "tokenizer.json")).token_to_id("<|image_pad|>")
    media = [result.media for result in stage.experience.results.values()]
    for ticket in tickets:
        episode = ticket.episode_id
        turns = [turn for turn in stage.engine.turns if turn[0].episode == episode]
        (first, said), (last, answered) = turns
        segment = stage.segment(episode)
        whole = np.concatenate([last.token_ids, answered.token_ids])
        assert np.array_equal(segment.token_ids, whole)
        place = first.token_ids.size
        assert np.array_equal(whole[:place], first.token_ids)
        assert np.array_equal(whole[place : place + said.token_ids.size], said.token_ids)
        assert segment.num_trained == said.token_ids.size + answered.token_ids.size
        assert segment.media == last.media
        assert segment.media[:1] == first.media
        # 42 and 120 pixels along a side, in squares of 28.
        assert [span.length for span in segment.media] == [4, 25]
        shown = np.concatenate([np.arange(span.start, span.end) for span in segment.media])
        assert np.array_equal(np.flatnonzero(segment.token_ids == pad), shown)
        assert [span.sha256 for span in segment.media] == [each.sha256 for each in media[0]]
        assert stage.experience.results[episode].reward == 0.5
    assert media == [media[0]] * 4
    stored = [each.read_bytes() for each in stage.stored.rglob("*") if each.is_file()]
    assert sorted(Picture.of(data).medium.sha256 for data in stored) == sorted(
        each.sha256 for each in media[0]
    )


def test_a_drawing_is_read_as_it_was_drawn() -> None:
    drawn = plugins.load("treadle.none", f"{PICTURES / 'drawing.py'}:drawn")
    counted = plugins.load("treadle.none", f"{PICTURES / 'drawing.py'}:counted")
    for squares in range(10):
        for cell in (14, 40):
            picture = drawn(squares, cell)
            assert counted(picture) == squares
            assert Picture.of(picture).width == 3 * cell


def test_a_run_of_the_recipe_stores_each_picture_once(tmp_path: Path) -> None:
    overrides = [f"run.dir={tmp_path}", "experience.steps=1", "experience.keep_payloads=true"]
    train = ["train", "examples/pictures/recipe.yaml", *overrides]
    for words in (train, ["fsck", str(tmp_path)]):
        command = [sys.executable, "-m", "treadle_cli.main", *words]
        told = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        assert told.returncode == 0, told.stdout + told.stderr
    stored = [each.read_bytes() for each in (tmp_path / "payloads").rglob("*") if each.is_file()]
    # The window may hold a task more than the step; its episodes show pictures of their own.
    pictures = [Picture.of(data).medium.sha256 for data in stored]
    shown = {each for cursor in range(3) for each in _shown(group(cursor, 1)[0])}
    assert len(pictures) == len(set(pictures))
    assert shown <= set(pictures)


def _shown(ticket: Ticket) -> list[str]:
    """The pictures of an episode, by sha256: a second one where the script miscounts."""
    drawn = plugins.load("treadle.none", f"{PICTURES / 'drawing.py'}:drawn")
    squares = int(str(ticket.spec["squares"]))
    return [Picture.of(drawn(squares, c)).medium.sha256 for c in (14, 40)[: 1 + (squares > 5)]]
