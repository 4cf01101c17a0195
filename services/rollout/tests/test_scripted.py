import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle_core.errors import InvalidFieldError, TreadleError
from treadle_core.tickets import Sampling
from treadle_rollout import conformance
from treadle_rollout.adapters.scripted import ScriptedEngine
from treadle_rollout.conformance.tables import Tables
from treadle_rollout.core.errors import ScriptError
from treadle_rollout.ports import GenerationRequest
from treadle_runtime.plugins import PluginConfig, build

VOCABULARY = Tables.vocabulary


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_conforms(check: conformance.Check) -> None:
    try:
        await conformance.run(check, Tables())
    except conformance.NotApplicableError as error:
        assert "needs a model" in str(error)  # noqa: PT017


async def test_a_script_is_said_word_by_word_and_ends_with_its_stop_token() -> None:
    engine = ScriptedEngine(script=lambda asked: [asked.token_ids.size, 5, 1])
    await engine.install(1)
    prompt = np.array([4, 4], np.int32)
    made = await engine.generate(GenerationRequest("s", prompt, Sampling(max_tokens=9)))
    assert made.token_ids.tolist() == [2, 5, 1]
    assert np.allclose(made.logprobs, -np.log(64))
    await engine.close()


async def test_a_script_of_a_recipe_answers_text_with_text(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "play.py").write_text(
        "def play(asked):\n"
        "    assert (asked.session, asked.episode) == ('s', 'e')\n"
        "    return {'ca': 'cab<end>', 'ab<end>': 'c'}[asked.text]\n"
    )
    config = PluginConfig.model_validate(
        {
            "name": "scripted",
            "script": f"{tmp_path}/play.py:play",
            "stop_tokens": ["<end>"],
            "weightless": True,
        }
    )
    engine: ScriptedEngine = build("treadle.engines", config, model=tokenizer.parent, slots=2)
    assert (engine.vocabulary, engine.stop_token_ids) == (6, {1})
    await engine.install(1)

    async def said(*ids: int) -> tuple[list[int], bool]:
        request = GenerationRequest("s", np.array(ids, np.int32), Sampling(max_tokens=9), "e")
        made = await engine.generate(request)
        assert np.allclose(made.logprobs, -np.log(6))
        return made.token_ids.tolist(), made.length

    assert await said(5) == ([4, 3, 1], False)
    assert await said(3, 1) == ([4], True)
    with pytest.raises(ScriptError, match="KeyError: 'b'"):
        await said(2)
    await engine.close()


@pytest.mark.parametrize("answer", [[], [64], [-1], "text without a tokenizer", None])
async def test_an_answer_that_is_none_fails_its_call_alone(answer: Any) -> None:
    engine = ScriptedEngine(script=lambda asked: answer if asked.session == "bad" else [1])
    await engine.install(1)
    for session in ("bad", "good"):
        call = engine.generate(GenerationRequest(session, np.array([4], np.int32), Sampling()))
        if session == "good":
            assert (await call).token_ids.tolist() == [1]
        else:
            with pytest.raises(ScriptError):
                await call
    await engine.close()


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"stop_tokens": ("<end>",)}, "engine.stop_tokens"), ({"script": "json:decoder"}, "script")],
)
def test_what_cannot_speak_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError, match=field):
        ScriptedEngine(**fields)


async def test_every_attempt_at_an_episode_says_the_same_whatever_was_published() -> None:
    engine = ScriptedEngine(weightless=True, vocabulary=VOCABULARY)
    assert engine.arrival.size == 0
    said: list[tuple[list[int], list[float]]] = []
    for version, session in ((1, "e-1"), (2, "e-2"), (2, "other")):
        await engine.install(version)
        episode = "" if session == "other" else "e"
        prompt = np.array([4, 4], np.int32)
        request = GenerationRequest(session, prompt, Sampling(max_tokens=9), episode)
        made = await engine.generate(request)
        assert set(made.policy_version.tolist()) == {version}
        said.append((made.token_ids.tolist(), made.logprobs.tolist()))
    assert said[0] == said[1] != said[2]
    await engine.close()


async def test_faults_happen_on_demand_and_leave_the_engine_as_good_as_before() -> None:
    engine = ScriptedEngine(fail_every=3, non_finite_at=2, hang_at=5, vocabulary=VOCABULARY)
    await engine.install(1)
    request = GenerationRequest("e-1", np.array([4, 4], np.int32), Sampling(max_tokens=9), "e")
    outcomes: list[object] = []
    for _ in range(6):
        try:
            async with asyncio.timeout(0.2):
                outcomes.append((await engine.generate(request)).token_ids.tolist())
        except (TreadleError, TimeoutError) as error:
            outcomes.append(getattr(error, "reason", "hung"))
    said = outcomes[0]
    assert outcomes == [said, "NON_FINITE_LOGPROB", "ENGINE_FAULT", said, "hung", "ENGINE_FAULT"]
    assert isinstance(said, list)
    assert engine.non_finite == 1
    await engine.close()
