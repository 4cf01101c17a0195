import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from treadle_agents import Env, PolicyError, Result, Turn
from treadle_agents.failures import EpisodeError
from treadle_agents.images.placeholders import Shown
from treadle_agents.loop import Limits, Words, run_episode
from treadle_agents.record import Generated
from treadle_core.episodes import Episode, FailureClass, Termination
from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Sampling

PIECES = ["a", "b", "ab", "<end>", "c"]
END = 3
SAMPLING = Sampling()
LIMITS = Limits(max_context=64, max_turns=8)


def encode(text: str) -> list[int]:
    """Longest piece first, so that it never says [0, 1] where [2] will do."""
    ids: list[int] = []
    while text:
        piece = max((p for p in PIECES if text.startswith(p)), key=len)
        ids.append(PIECES.index(piece))
        text = text[len(piece) :]
    return ids


def decode(ids: list[int]) -> str:
    return "".join(PIECES[i] for i in ids)


@dataclass
class Policy:
    """Says the turns that it is given, the last one for ever; remembers what it was shown."""

    turns: list[list[int]]
    length: bool = False
    versions: list[int] = field(default_factory=lambda: [1])
    shown: list[list[int]] = field(default_factory=list)

    async def generate(self, prompt: Shown, sampling: Sampling) -> Generated:
        ids = self.turns[min(len(self.shown), len(self.turns) - 1)][: sampling.max_tokens]
        version = self.versions[min(len(self.shown), len(self.versions) - 1)]
        self.shown.append(prompt.token_ids.tolist())
        return Generated(
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            policy_version=np.full(len(ids), version, np.int32),
            context_version=np.full(len(ids), 1, np.int32),
            length=self.length or ids[-1:] != [END],
        )


@dataclass
class Scripted(Env):
    """Answers every turn with what `answer` makes of it."""

    answer: Callable[[Turn], Any]
    closed: int = 0
    turns: list[Turn] = field(default_factory=list)

    def step(self, turn: Turn) -> Result:
        self.turns.append(turn)
        return self.answer(turn)

    def close(self) -> None:
        self.closed += 1


async def inline(call: Callable[[], Any]) -> Any:
    return call()


async def run(
    env: Env,
    policy: Policy,
    *,
    prompt: str = "c",
    sampling: Sampling = SAMPLING,
    limits: Limits = LIMITS,
) -> Episode:
    return await run_episode(
        env,
        {"prompt": prompt},
        generate=policy.generate,
        words=Words(encode, decode),
        sampling=sampling,
        limits=limits,
        in_thread=inline,
    )


async def test_each_turn_continues_the_sampled_ids_whatever_the_tokenizer_would_make_of_them() -> (
    None
):
    policy = Policy([[0, 1, END], [2, END]], versions=[1, 2])
    env = Scripted(lambda turn: Result("ab", terminated=turn.number == 2))
    episode = await run(env, policy, prompt="abc")
    (segment,) = episode.segments
    assert policy.shown == [[2, 4], [2, 4, 0, 1, END, 2]]
    assert segment.token_ids.tolist() == [2, 4, 0, 1, END, 2, 2, END]
    assert segment.sampled.tolist() == [False, False, True, True, True, False, True, True]
    assert segment.trained.tolist() == segment.sampled.tolist()
    assert segment.logprobs.tolist() == [0, 0, -0.5, -0.5, -0.5, 0, -0.5, -0.5]
    assert segment.policy_version.tolist() == [-1, -1, 1, 1, 1, -1, 2, 2]
    assert segment.context_version.tolist() == [-1, -1, 1, 1, 1, -1, 1, 1]
    assert [turn.action for turn in env.turns] == ["ab<end>", "ab<end>"]
    assert [turn.observation for turn in env.turns] == ["abc", "ab"]
    assert episode.termination is Termination.FINISHED


@pytest.mark.parametrize(
    ("rewards", "total", "by_turn"),
    [
        pytest.param([None, None], None, (), id="absent-is-not-zero"),
        pytest.param([None, 1.0], 1.0, (), id="one-of-two"),
        pytest.param([0.25, 0.5], 0.75, (0.25, 0.5), id="summed"),
        pytest.param([0, 0], 0.0, (0.0, 0.0), id="zero-is-present"),
        pytest.param([np.float32(0.5), np.int64(1)], 1.5, (0.5, 1.0), id="numpy"),
    ],
)
async def test_rewards_of_turns_are_summed(rewards: list, total: float, by_turn: tuple) -> None:
    env = Scripted(
        lambda turn: Result(
            "c",
            reward=rewards[turn.number - 1],
            terminated=turn.number == len(rewards),
            metrics={"turn": turn.number, f"only_{turn.number}": 1},
        )
    )
    episode = await run(env, Policy([[0, END]]))
    assert (episode.reward, episode.turn_rewards) == (total, by_turn)
    assert episode.metrics == {"turn": 2, "only_1": 1, "only_2": 1}


async def test_a_turn_cut_by_its_length_is_still_judged_and_the_episode_is_truncated() -> None:
    env = Scripted(lambda turn: Result("c", reward=0.5))
    episode = await run(env, Policy([[0, 1, 0, 1]]), sampling=Sampling(max_tokens=3))
    assert (episode.reward, episode.termination) == (0.5, Termination.TRUNCATED)
    assert [turn.action for turn in env.turns] == ["aba"]


async def test_the_last_allowed_turn_truncates_and_its_observation_is_not_recorded() -> None:
    env = Scripted(lambda turn: Result("cc"))
    episode = await run(env, Policy([[0, END]]), limits=Limits(max_context=64, max_turns=2))
    assert episode.termination is Termination.TRUNCATED
    assert episode.segments[0].token_ids.tolist() == [4, 0, END, 4, 4, 0, END]


@pytest.mark.parametrize("size", range(1, 9))
async def test_whatever_fills_the_context_ends_the_episode_inside_it(size: int) -> None:
    env = Scripted(lambda turn: Result("c" * size, reward=1.0))
    policy = Policy([[0, END]])
    episode = await run(env, policy, limits=Limits(max_context=12, max_turns=99))
    (segment,) = episode.segments
    assert episode.termination is Termination.TRUNCATED
    assert segment.num_tokens <= 12
    assert segment.sampled[-1]
    assert all(segment.token_ids[: len(shown)].tolist() == shown for shown in policy.shown)


async def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers() -> None:
    policy = Policy([[0, END]])
    env = Scripted(lambda turn: Result(terminated=True))
    with pytest.raises(EpisodeError, match="1 to 7 tokens, got 8") as failed:
        await run(env, policy, prompt="c" * 8, limits=Limits(max_context=8, max_turns=1))
    assert failed.value.failure_class is FailureClass.ENVIRONMENT
    assert (policy.shown, env.closed) == ([], 1)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, "agent.result: expected a treadle_agents.Result, got NoneType"),
        ({"reward": 1.0}, "agent.result: expected a treadle_agents.Result, got dict"),
        (Result(reward="1"), "agent.result.reward: expected a number in .*got str"),
        (Result(reward=float("nan")), "agent.result.reward: expected a number in .*got nan"),
        (Result(reward=float("inf")), "agent.result.reward: expected a number in .*got inf"),
        (Result(reward=-2e6), "agent.result.reward: expected a number in .*got -2e"),
        (Result(reward=10**5000), "agent.result.reward: expected a number in .*a larger one"),
        (Result(reward=1j), "agent.result.reward: expected a number in .*got complex"),
        (Result(observation=b"c"), "agent.result.observation: expected text, got bytes"),
        (Result(observation="\ud800"), "agent.result.observation: expected valid Unicode"),
        (Result(observation="c" * 5_000_000), "agent.result.observation: .*got 5000000"),
        (Result(terminated=1), "agent.result.terminated: expected True or False, got int"),
        (Result(truncated=None), "agent.result.truncated: expected True or False"),
        (Result(metrics=[("a", 1.0)]), "agent.result.metrics: expected a mapping"),
        (Result(metrics={"a": None}), "agent.result.metrics.a: expected a number"),
        (Result(metrics={1: 1.0}), "agent.result.metrics: expected names of 1 to 128"),
        (Result(metrics={str(i): 1.0 for i in range(65)}), "agent.result.metrics: .*got 65"),
    ],
)
async def test_a_result_of_another_shape_is_the_environments_failure(
    result: object, says: str
) -> None:
    env = Scripted(lambda turn: result)
    with pytest.raises(EpisodeError, match=says) as failed:
        await run(env, Policy([[0, END]]))
    assert failed.value.failure_class is FailureClass.ENVIRONMENT
    assert env.closed == 1


async def test_metrics_and_rewards_are_bounded_over_all_turns() -> None:
    with pytest.raises(EpisodeError, match=r"summed.*got 1\.8e\+06"):
        await run(
            Scripted(lambda turn: Result("c", reward=9e5, terminated=turn.number == 2)),
            Policy([[0, END]]),
        )
    with pytest.raises(EpisodeError, match=r"metrics.*got 80"):
        await run(
            Scripted(
                lambda turn: Result("c", metrics={f"{turn.number}-{i}": 1 for i in range(40)})
            ),
            Policy([[0, END]]),
        )


class Own(BaseException):
    pass


RAISED = [
    ValueError("x"),
    StopIteration(),
    SystemExit(0),
    KeyboardInterrupt(),
    Own(),
    RecursionError(),
]
RAISED += [asyncio.CancelledError(), MemoryError(), StopAsyncIteration()]


@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("kind", ["plain", "async", "returns-awaitable"])
@pytest.mark.parametrize("in_thread", [inline, asyncio.to_thread], ids=["inline", "thread"])
async def test_whatever_an_environment_raises_is_its_failure(
    method: str, error: BaseException, kind: str, in_thread: Any
) -> None:
    def fails(*_: object) -> Any:
        raise error

    async def fails_later(*_: object) -> Any:
        fails()

    env = Scripted(lambda turn: Result("c"))
    bad = {"plain": fails, "async": fails_later, "returns-awaitable": lambda *_: fails_later()}
    setattr(env, method, bad[kind])
    with pytest.raises(EpisodeError) as failed:
        await run_episode(
            env,
            {"prompt": "c"},
            generate=Policy([[0, END]]).generate,
            words=Words(encode, decode),
            sampling=Sampling(),
            limits=Limits(64, 8),
            in_thread=in_thread,
        )
    assert failed.value.failure_class is FailureClass.ENVIRONMENT
    assert env.closed == 1


async def test_a_policy_error_is_the_policys_failure_once_it_has_spoken() -> None:
    def refuse(*_: object) -> Any:
        raise PolicyError("not a number: ab")

    env = Scripted(refuse)
    with pytest.raises(EpisodeError, match="not a number: ab") as failed:
        await run(env, Policy([[0, END]]))
    assert failed.value.failure_class is FailureClass.POLICY
    env.reset = refuse
    with pytest.raises(EpisodeError) as failed:
        await run(env, Policy([[0, END]]))
    assert failed.value.failure_class is FailureClass.ENVIRONMENT


async def test_a_failing_close_is_logged_and_changes_nothing(caplog: Any) -> None:
    def fails() -> None:
        raise OSError("gone")

    env = Scripted(lambda turn: Result(reward=1.0, terminated=True))
    env.close = fails
    episode = await run(env, Policy([[0, END]]))
    assert episode.reward == 1.0
    assert "agent.close failed: OSError: gone" in caplog.text


async def test_async_methods_are_awaited() -> None:
    class Later(Env):
        closed = False

        async def reset(self, task: Mapping[str, Any]) -> str:
            await asyncio.sleep(0)
            return "c"

        async def step(self, turn: Turn) -> Result:
            await asyncio.sleep(0)
            return Result(reward=1.0, terminated=True)

        async def close(self) -> None:
            await asyncio.sleep(0)
            self.closed = True

    env = Later()
    assert (await run(env, Policy([[0, END]]))).reward == 1.0
    assert env.closed


async def test_cancelling_an_episode_closes_its_environment() -> None:
    started = asyncio.Event()

    class Sleeper(Scripted):
        async def step(self, turn: Turn) -> Result:
            started.set()
            await asyncio.sleep(60)
            return Result()

    env = Sleeper(lambda turn: Result())
    task = asyncio.create_task(run(env, Policy([[0, END]])))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.closed == 1


async def test_a_task_without_a_prompt_fails_with_the_field() -> None:
    with pytest.raises(EpisodeError, match=r"task\.prompt: expected text, got NoneType"):
        await run_episode(
            Env(),
            {},
            generate=Policy([[0]]).generate,
            words=Words(encode, decode),
            sampling=Sampling(),
            limits=Limits(8, 8),
        )


async def test_greedy_tokens_are_never_trained() -> None:
    env = Scripted(lambda turn: Result(terminated=True))
    episode = await run(env, Policy([[0, END]]), sampling=Sampling(temperature=0))
    (segment,) = episode.segments
    assert (segment.sampled.sum(), segment.num_trained, segment.temperature) == (2, 0, 0)


@pytest.mark.parametrize("turn", [[], [0] * 99], ids=["nothing", "more-than-asked"])
async def test_an_engine_that_breaks_its_contract_is_no_environment_failure(turn: list) -> None:
    class Broken(Policy):
        async def generate(self, prompt: Shown, sampling: Sampling) -> Generated:
            ids, ones = np.array(turn, np.int32), np.ones(len(turn), np.int32)
            return Generated(ids, -ones.astype(np.float32), ones, ones, length=True)

    with pytest.raises(InvalidFieldError, match="generated"):
        await run(Scripted(lambda turn: Result()), Broken([[0]]))


async def test_failures_show_where_but_no_secrets_and_no_folders() -> None:
    def fails(turn: Turn) -> Any:
        raise ValueError("bad call: api_key=hunter2 Authorization: Bearer abc" + "x" * 10_000)

    with pytest.raises(EpisodeError) as failed:
        await run(Scripted(fails), Policy([[0, END]]))
    message = failed.value.message
    assert "ValueError: bad call: api_key=*** Authorization: ***" in message
    assert "test_loop.py:" in message
    assert "/" not in message
    assert len(message) < 1500
