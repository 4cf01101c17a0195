"""Engine `vllm` where the conformance suite does not look: long prompts, and what may go wrong."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import CONSTRAINTS, Sampling
from treadle_rollout.conformance.subject import check_turn, install, prompt, request
from treadle_rollout.core.errors import EngineBrokenError
from treadle_rollout.ports import GenerationRequest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own, while it is imported
    pytest.importorskip("vllm", reason="needs vLLM: pip install 'treadle-rollout[vllm]'")
    from treadle_rollout.adapters.vllm_engine import versions
    from treadle_rollout.adapters.vllm_engine.constraints import follows
    from treadle_rollout.conformance.vllm_model import VllmModel, tiny_config

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("default"),  # vLLM's own
]
MODULE = pytest.mark.asyncio(loop_scope="module")

LONG = 300
"""Tokens of a prompt that fills blocks of keys, which hold up to 128."""
POLICY = Path(__file__).parents[3] / "examples" / "calculator" / "policy"


class Served:
    """One engine for tests that each bring versions of their own."""

    def __init__(self, subject: VllmModel, engine: Any) -> None:
        self.subject = subject
        self.engine = engine
        self.version = 0
        self.cached: list[int] = []

    async def next(self) -> int:
        self.version += 1
        await install(self.engine, self.subject, self.version)
        return self.version

    def note_cached(self) -> None:
        """Keeps how many tokens of each call's prompt had cached keys."""
        stream = self.engine._core.stream

        async def noted(*arguments: Any) -> AsyncGenerator[Any]:
            first = True
            async for output in stream(*arguments):
                if first:
                    self.cached.append(output.num_cached_tokens)
                first = False
                yield output

        self.engine._core.stream = noted


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: Any) -> AsyncGenerator[Served]:
    """A model with a tied head, and a generation config that must not matter."""
    folder = tmp_path_factory.mktemp("tied")
    subject = VllmModel(tiny_config(tie_word_embeddings=True), folder)
    own = {"temperature": 0.1, "top_k": 1, "repetition_penalty": 5.0, "eos_token_id": [*range(16)]}
    (folder / "generation_config.json").write_text(json.dumps(own))
    found = Served(subject, subject.engine(slots=4, max_context=512))
    found.note_cached()
    yield found
    await found.engine.close()


@MODULE
async def test_a_tied_head_is_that_of_every_version(served: Served) -> None:
    for seed in range(3):
        version = await served.next()
        ids = prompt(served.subject, 9, seed=seed)
        turn = await served.engine.generate(request("a", ids, 12))
        assert turn.policy_version.tolist() == [version] * turn.token_ids.size
        check_turn(served.subject, ids, turn, 1.0)


@MODULE
async def test_the_checkpoints_own_sampling_is_not_taken(served: Served) -> None:
    await served.next()
    ids = prompt(served.subject, 4)

    turn = await served.engine.generate(request("a", ids, 40))

    assert turn.length
    assert turn.token_ids.size == 40
    check_turn(served.subject, ids, turn, 1.0)


@MODULE
async def test_keys_are_shared_under_the_same_weights_alone(served: Served) -> None:
    ids = prompt(served.subject, LONG, seed=5)

    async def cached(name: str) -> int:
        turn = await served.engine.generate(request(name, ids, 4))
        check_turn_of_weights(turn)
        return served.cached[-1]

    def check_turn_of_weights(turn: Any) -> None:
        fresh = served.subject.logprobs(weights, np.concatenate([ids, turn.token_ids]), 1.0)
        assert np.abs(fresh[LONG - 1 :] - turn.logprobs).max() <= 1e-4

    weights = await served.next()
    assert await cached("a") == 0
    assert await cached("b") > 0
    served.version += 1
    await served.engine.alias(served.version)
    assert await cached("c") > 0
    # Nothing runs: what was cached stays, and is of no use under other weights.
    weights = await served.next()
    assert await cached("d") == 0
    assert await cached("d") > 0


@MODULE
async def test_calls_with_shared_prompts_go_on_over_installs(served: Served) -> None:
    """Eight calls in four slots: some are amid their turn at an install, some have yet to start."""
    await served.next()
    shared = prompt(served.subject, LONG, seed=6)
    calls = [
        asyncio.create_task(served.engine.generate(request(f"s{i}", shared, 120))) for i in range(8)
    ]
    for _ in range(4):
        await asyncio.sleep(0.15)
        await served.next()
    turns = await asyncio.gather(*calls)

    spanning = [turn for turn in turns if np.unique(turn.policy_version).size > 1]
    assert spanning
    for turn in turns:
        assert turn.token_ids.size == 120
        check_turn(served.subject, shared, turn, 1.0)
    after = await served.engine.generate(request("after", shared, 8))
    check_turn(served.subject, shared, after, 1.0)


@MODULE
async def test_an_install_that_nobody_waits_for_happens(served: Served) -> None:
    await served.next()
    served.version += 1
    served.engine.arrival[:] = served.subject.weights(served.version)
    swap = asyncio.create_task(served.engine.install(served.version))
    await asyncio.sleep(0)
    swap.cancel()
    await asyncio.wait([swap])

    assert swap.cancelled()
    assert served.engine.served_version == served.version
    ids = prompt(served.subject, 7)
    check_turn(served.subject, ids, await served.engine.generate(request("a", ids, 8)), 1.0)


@MODULE
async def test_a_temperature_that_vllm_would_change_is_refused(served: Served) -> None:
    await served.next()
    with pytest.raises(InvalidFieldError) as caught:
        await served.engine.generate(request("a", prompt(served.subject, 4), 4, temperature=0.001))
    assert caught.value.field == "temperature"


@pytest.mark.parametrize("version", ["0.25.1", "0.33.0", "1.0", "dev"])
def test_a_vllm_that_nobody_tried_is_refused(version: str) -> None:
    with pytest.raises(versions.UnsupportedVllmError, match=r"0.26 to 0.32"):
        versions.check(version)


@pytest.mark.parametrize("version", ["0.26.0", "0.29.1rc2+cpu", "0.32.0"])
def test_a_vllm_between_those_that_were_tried_is_taken(version: str) -> None:
    versions.check(version)


@MODULE
async def test_a_killed_core_fails_what_runs_and_what_comes(tmp_path: Path) -> None:
    subject = VllmModel(tiny_config(), tmp_path)
    before = set(psutil.Process().children(recursive=True))
    engine = subject.engine(slots=2, max_context=2048)
    try:
        await install(engine, subject, 1)
        call = asyncio.create_task(engine.generate(request("a", prompt(subject, 3), 2040)))
        await asyncio.sleep(0.3)
        assert not call.done()
        for process in _cores(before):
            process.send_signal(signal.SIGKILL)
        async with asyncio.timeout(30):
            with pytest.raises(EngineBrokenError):
                await call
            with pytest.raises(EngineBrokenError):
                await engine.generate(request("b", prompt(subject, 3), 4))
            with pytest.raises(EngineBrokenError):
                await engine.install(2)
    finally:
        await engine.close()


def _cores(before: set[psutil.Process]) -> list[psutil.Process]:
    """Processes that were started since, but for what multiprocessing has of its own."""
    since = set(psutil.Process().children(recursive=True)) - before
    found = [each for each in since if "resource_tracker" not in " ".join(each.cmdline())]
    assert found
    return found


@MODULE
async def test_a_killed_replica_leaves_no_core_behind(tmp_path: Path) -> None:
    program = tmp_path / "replica.py"
    program.write_text(
        "import asyncio, sys, time\n"
        "from pathlib import Path\n"
        "from treadle_rollout.conformance.vllm_model import VllmModel, tiny_config\n"
        "if __name__ == '__main__':\n"
        "    engine = VllmModel(tiny_config(), Path(sys.argv[1])).engine(slots=1, max_context=64)\n"
        "    print('up', flush=True)\n"
        "    time.sleep(600)\n"
    )
    replica = subprocess.Popen(  # noqa: ASYNC220, it lives on
        [sys.executable, str(program), str(tmp_path / "model")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert replica.stdout is not None
    try:
        assert replica.stdout.readline() == "up\n"
        cores = psutil.Process(replica.pid).children(recursive=True)
        assert cores
    finally:
        os.kill(replica.pid, signal.SIGKILL)
        replica.wait()
        replica.stdout.close()
    deadline = time.monotonic() + 30
    while any(each.is_running() and each.status() != "zombie" for each in cores):
        assert time.monotonic() < deadline, cores
        await asyncio.sleep(0.2)


MARKERS = ("<end>", "<marker>")


def bytes_tokenizer(folder: Path) -> Tokenizer:
    """One token a byte, and the markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in MARKERS])
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=MARKERS[0])
    whole.save_pretrained(folder)
    return tokenizer


@MODULE
async def test_turns_obey_schemas_and_grammars(tmp_path: Path) -> None:
    subject = VllmModel(tiny_config(vocab_size=258), tmp_path)
    tokenizer = bytes_tokenizer(tmp_path)
    end, marker = (tokenizer.token_to_id(each) for each in MARKERS)
    engine: Any = subject.engine(slots=4, max_context=128, stop_tokens=(end,))
    try:
        assert engine.samplings >= CONSTRAINTS
        await install(engine, subject, 1)
        ids = np.array([7, 8, 9], np.int32)

        async def said(**fields: Any) -> Any:
            return await engine.generate(GenerationRequest("a", ids, Sampling(1.0, 24, **fields)))

        named = await said(grammar=f'start: <[{marker}]> "ab" <[{marker}]>')
        assert named.token_ids.tolist() == [marker, *tokenizer.encode("ab").ids, marker, end]
        assert not named.length
        with pytest.raises(InvalidFieldError) as caught:
            await said(grammar="start: nonsense")
        assert caught.value.field == "grammar"
        free, bound = await asyncio.gather(said(), said(schema={"enum": ["x", "yy"]}))
        check_turn(subject, ids, free, 1.0)
        assert json.loads(tokenizer.decode(bound.token_ids.tolist())) in ("x", "yy")
        assert np.isfinite(bound.logprobs).all()
    finally:
        await engine.close()


def test_a_tokenizer_that_vllm_cannot_follow_with_is_known(tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer(tmp_path)
    end, marker = (tokenizer.token_to_id(each) for each in MARKERS)

    assert follows(tmp_path, frozenset({end}), 258)
    assert not follows(tmp_path, frozenset({marker}), 258)
    assert not follows(POLICY, frozenset({6}), 23)
