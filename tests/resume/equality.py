"""What has to be equal, between the lives of a run and between two runs."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lives import Lives

from treadle_experience.fsck import examine

SAME_BATCH = ("members_digest", "loss", "weights_digest")
"""Of a step that is trained again: the same results of the same attempts, to the last bit."""


def trained_again(rows: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Rows of each step that has more than one."""
    by_step: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_step[row["step"]].append(row)
    return {step: found for step, found in sorted(by_step.items()) if len(found) > 1}


def unequal_lives(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Steps that were trained again, and not as before."""
    return [
        step
        for step, found in trained_again(rows).items()
        if len({tuple(row[key] for key in SAME_BATCH) for row in found}) > 1
    ]


def unequal_runs(one: Lives, other: Lives, steps: int) -> list[int]:
    """Steps of two runs that have not the same episodes, loss and weights, or are not there.

    Attempts and version numbers may differ: a process that was killed took some with it.
    """
    ours, theirs = outcomes_of(one), outcomes_of(other)
    return [
        step
        for step in range(1, steps + 1)
        if step not in ours or step not in theirs or ours[step] != theirs[step]
    ]


def outcomes_of(run: Lives) -> dict[int, tuple[Any, ...]]:
    """Members, loss and weights digest of each step as it was trained last."""
    members = members_of(run.directory)
    return {
        row["step"]: (members.get(row["step"]), row["loss"], row["weights_digest"])
        for row in run.rows()
    }


def members_of(run: Path) -> dict[int, list[str]]:
    """Ids of the episodes of each step, in order, as the ledger has them."""
    state = examine(run).state
    return {
        number: [e.episode_id for task in step.task_ids for e in state.tasks[task].episodes]
        for number, step in state.steps.items()
    }
