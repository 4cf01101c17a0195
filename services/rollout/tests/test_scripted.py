import asyncio

import numpy as np
import pytest

from treadle_core.errors import TreadleError
from treadle_core.tickets import Sampling
from treadle_rollout import conformance
from treadle_rollout.adapters.scripted import ScriptedEngine
from treadle_rollout.conformance.tables import Tables
from treadle_rollout.ports import GenerationRequest

VOCABULARY = Tables.vocabulary


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_conforms(check: conformance.Check) -> None:
    try:
        await conformance.run(check, Tables())
    except conformance.NotApplicableError as error:
        assert "needs a model" in str(error)  # noqa: PT017


async def test_a_script_is_said_word_by_word_and_ends_with_its_stop_token() -> None:
    engine = ScriptedEngine(script=lambda session, prompt_tokens: [prompt_tokens, 5, 1])
    await engine.install(1)
    prompt = np.array([4, 4], np.int32)
    made = await engine.generate(GenerationRequest("s", prompt, Sampling(max_tokens=9)))
    assert made.token_ids.tolist() == [2, 5, 1]
    assert np.allclose(made.logprobs, -np.log(64))
    await engine.close()


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
