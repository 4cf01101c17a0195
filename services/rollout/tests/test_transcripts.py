"""Which episodes are written out for people, and how."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from treadle_agents.loop import Outcome
from treadle_core.episodes import FailureClass, Segment, Termination
from treadle_core.tickets import Ticket
from treadle_rollout.ports import Attempt, Failure
from treadle_rollout.transcripts import EVERY_S, LONGEST, Transcripts, shortened

OUTCOME = Outcome(0.5, Termination.FINISHED, {}, ())


class Rows(list[tuple[str, dict[str, Any]]]):
    def log(self, name: str, values: Any) -> None:
        self.append((name, dict(values)))


def segment(*ids: int, version: int = 3) -> Segment:
    sampled = np.ones(len(ids), np.bool_)
    versions = np.full(len(ids), version, np.int32)
    logprobs = np.zeros(len(ids), np.float32)
    return Segment(np.array(ids, np.int32), sampled, sampled, logprobs, versions, versions)


def spell(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_the_first_episode_and_then_one_a_while(ticket: Callable[..., Ticket]) -> None:
    rows, now = Rows(), [100.0]
    transcripts = Transcripts(spell, rows, clock=lambda: now[0])

    for name, time in (("a", 0.0), ("b", EVERY_S - 0.1), ("c", EVERY_S), ("d", EVERY_S + 1)):
        now[0] = 100.0 + time
        transcripts.note(ticket(name), [segment(104, 105)], OUTCOME)

    assert [row["episode_id"] for _, row in rows] == ["a", "c"]
    assert rows[0] == (
        "transcript",
        {
            "episode_id": "a",
            "task_id": "task-a",
            "attempt": 1,
            "version": 3,
            "text": "hi",
            "reward": 0.5,
        },
    )


def test_the_first_failure_and_then_one_a_while() -> None:
    rows, now = Rows(), [100.0]
    transcripts = Transcripts(spell, rows, clock=lambda: now[0])

    for name, time in (("a", 0.0), ("b", EVERY_S - 0.1), ("c", EVERY_S)):
        now[0] = 100.0 + time
        failure = Failure(FailureClass.ENVIRONMENT, "KeyError: 'x'")
        transcripts.note_failure(Attempt(name, 2), failure)

    said = {"attempt": 2, "class": "environment", "message": "KeyError: 'x'"}
    assert rows == [("failure", {"episode_id": name} | said) for name in ("a", "c")]


def test_a_reward_that_there_is_not_is_absent(ticket: Callable[..., Ticket]) -> None:
    rows = Rows()

    Transcripts(spell, rows).note(
        ticket(), [segment(104)], Outcome(None, Termination.TRUNCATED, {}, ())
    )

    assert "reward" not in rows[0][1]


def test_of_a_long_episode_only_both_ends_are_decoded(ticket: Callable[..., Ticket]) -> None:
    rows, decoded = Rows(), list[int]()

    def counted(ids: list[int]) -> str:
        decoded.append(len(ids))
        return spell(ids)

    ids = [97] * 50_000 + [98] * 50_000
    Transcripts(counted, rows).note(ticket(), [segment(*ids)], OUTCOME)

    text = rows[0][1]["text"]
    assert sum(decoded) == 2 * LONGEST
    assert len(text) == LONGEST
    assert (text[:3], text[-3:]) == ("aaa", "bbb")
    assert "cut" in text


def test_a_text_that_is_short_enough_is_whole() -> None:
    assert shortened("x" * LONGEST) == "x" * LONGEST
    assert len(shortened("x" * (LONGEST + 1))) == LONGEST


def test_a_tokenizer_that_fails_breaks_no_episode(
    ticket: Callable[..., Ticket], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(ids: list[int]) -> str:
        raise OverflowError(ids)

    rows = Rows()

    Transcripts(fail, rows).note(ticket("a"), [segment(1)], OUTCOME)

    assert rows == []
    assert "no transcript of episode a: OverflowError([1])" in caplog.text
