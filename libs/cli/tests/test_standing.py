"""What the rows of a run add up to."""

from typing import Any

import pytest

from treadle_cli.standing import HOPELESS, Standing


def start(service: str, time: float, restarts: int = 0) -> tuple[str, dict[str, Any]]:
    row = {"time": time, "name": "start", "service": service, "pid": 7, "restarts": restarts}
    return "supervisor", row


def death(service: str, time: float) -> tuple[str, dict[str, Any]]:
    row = {"time": time, "name": "death", "service": service, "pid": 7, "signal": "SIGKILL"}
    row |= {"status": -1, "memory_kill": "no", "last_line": "the last"}
    return "supervisor", row


def step(number: int, time: float, **values: Any) -> tuple[str, dict[str, Any]]:
    row = {"time": time, "name": "step", "step": number, "reward": number / 10, "wait_s": 0.5}
    row |= {"train_s": 1.0, "publish_s": 0.25, "lag_mean": 1.0, "lag_max": 2}
    return "trainer", row | {"tokens_per_s": 5000.0} | values


def engine(time: float, *, up_s: float, waited_s: float) -> tuple[str, dict[str, Any]]:
    row = {"time": time, "name": "rollout", "up_s": up_s, "waited_s": waited_s}
    return "rollout", row | {"tokens_per_s": 900.0}


def standing_of(*rows: tuple[str, dict[str, Any]], steps: int = 10) -> Standing:
    standing = Standing(steps)
    for writer, row in rows:
        standing.fold(writer, row)
    return standing


def test_the_time_left_is_that_of_the_last_steps_of_this_life() -> None:
    earlier = [start("trainer", 0), step(1, 10), step(2, 20)]
    now = [start("trainer", 1000), step(3, 1010), step(4, 1012), step(5, 1014)]

    assert standing_of(*earlier).left_s(now=20) == 80
    assert standing_of(*earlier, now[0]).left_s(now=1001) is None
    assert standing_of(*earlier, *now).left_s(now=1015) == 9
    ended = ("supervisor", {"time": 1016, "name": "end", "status": 130})
    assert standing_of(*earlier, *now, ended).left_s(now=1015) is None


def test_a_step_that_is_trained_again_takes_back_those_after_it() -> None:
    standing = standing_of(*(step(n, n) for n in (1, 2, 3, 4)), step(3, 9, reward=0.9))

    assert standing.rewards == {1: 0.1, 2: 0.2, 3: 0.9}
    assert standing.step == 3


def test_waits_are_shares_of_the_time_since_the_row_before() -> None:
    installed = ("rollout", {"time": 3, "name": "version", "install_s": 0.5})
    standing = standing_of(
        *(step(1, 10), step(2, 12)),
        *(engine(2, up_s=2, waited_s=1), installed, engine(4, up_s=4, waited_s=2)),
    )

    for time, total_s in ((10, 0.5), (20, 2.5)):
        standing.fold("refit", {"time": time, "name": "version", "total_s": total_s})
    for up_s, append_s in ((5.0, 1.0), (9.0, 2.0)):
        counts = {"time": up_s, "name": "counts", "up_s": up_s, "append_s": append_s}
        standing.fold("experience", counts)

    assert standing.waits["refit"] == {"work": 0.75}
    assert standing.waits["experience"] == {"work": 0.75}
    assert standing.waits["trainer"] == {"rollout": 0.25, "refit": 0.125}
    assert standing.waits["rollout"] == {"trainer": 0.5, "refit": 0.25}


def test_counts_of_an_engine_that_started_again_begin_anew() -> None:
    standing = standing_of(engine(90, up_s=90, waited_s=80), engine(95, up_s=2, waited_s=1))

    assert standing.waits["rollout"]["trainer"] <= 1
    assert standing.engine["up_s"] == 2


def test_a_death_is_a_warning_until_the_next_life_of_the_run() -> None:
    rows = [start("trainer", 0), start("refit", 0), death("trainer", 5)]

    (down,) = standing_of(*rows).warnings().values()
    (again,) = standing_of(*rows, start("trainer", 6, restarts=1)).warnings().values()
    later = standing_of(*rows, start("trainer", 9), start("refit", 9))

    assert down == "trainer ended with signal SIGKILL, and is down; its last line: the last"
    assert again == down.replace("is down", "was started again")
    assert (later.warnings(), later.began) == ({}, 9)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (("trainer", {"name": "no_progress", "waited_s": 600.0}), "600 s without a batch"),
        (("refit", {"name": "version", "left_behind": 2}), "2 engines left behind"),
        (
            ("experience", {"name": "counts", "failures_policy": 3, "failures_environment": 1}),
            "failed attempts: 3 policy, 1 environment; logs/rollout.log says why",
        ),
        (
            ("rollout", {"name": "rollout", "up_s": 2, "waited_s": 0, "non_finite": 4}),
            "4 calls were not finite",
        ),
        (("experience", {"name": "counts", "lost_payloads": 1}), "1 payloads lost"),
        (("trainer", {"name": "handed_back"}), "1 batches handed back by the trainer"),
    ],
    ids=["no-progress", "left-behind", "failed-attempts", "non-finite", "payloads", "handed-back"],
)
def test_what_a_person_should_know_is_a_warning(row: tuple[str, Any], said: str) -> None:
    standing = standing_of((row[0], {"time": 1.0, **row[1]}))

    assert list(standing.warnings().values()) == [said]


def test_a_failure_is_told_with_its_reason() -> None:
    failure = ("rollout", {"time": 1, "name": "failure", "message": "KeyError: {x}\n  a.py:3"})
    counts = ("experience", {"time": 2, "name": "counts", "failures_environment": 1})

    (said,) = standing_of(failure, counts).warnings().values()

    assert said.startswith("failed attempts: 1 environment, the newest with: KeyError: {x};")


def test_a_step_without_any_reward_is_a_warning() -> None:
    number, row = step(1, 2)
    del row["reward"]

    (said,) = standing_of((number, row | {"num_episodes": 8})).warnings().values()

    assert said == "8 episodes, and none has a reward: nothing is learnt"


@pytest.mark.parametrize(
    ("failed", "completed", "trained", "is_hopeless"),
    [(HOPELESS, 0, 0, True), (HOPELESS - 1, 0, 0, False), (999, 1, 0, False), (999, 0, 1, False)],
)
def test_a_run_is_hopeless_where_all_attempts_fail_in_the_agent(
    failed: int, completed: int, trained: int, is_hopeless: bool
) -> None:
    counts = {"attempts_failed_environment": failed, "attempts_completed": completed}
    row = {"time": 1, "name": "rollout", "up_s": 2, "waited_s": 0} | counts

    standing = standing_of(("rollout", row), *[step(1, 2)][:trained])

    assert standing.is_hopeless is is_hopeless


def test_a_batch_ends_the_warning_that_there_is_none() -> None:
    stalled = ("trainer", {"time": 1, "name": "no_progress", "waited_s": 600.0})

    assert standing_of(stalled, step(1, 2)).warnings() == {}


def test_scores_are_in_the_order_of_their_steps_the_later_row_counting() -> None:
    def score(step: int, value: float) -> tuple[str, dict[str, Any]]:
        row = {"time": 1, "name": "evaluation", "evaluation": "greedy", "step": step}
        return "experience", row | {"score": value, "num_scored": 3, "num_failed": 0}

    standing = standing_of(score(5, 0.5), score(0, 0.1), score(5, 0.6))

    assert [(each.step, each.score) for each in standing.scores["greedy"]] == [(0, 0.1), (5, 0.6)]


def test_kinds_of_rows_that_it_does_not_know_change_nothing() -> None:
    assert standing_of(("trainer", {"time": 0.0, "name": "news"})) == Standing(10)
