"""Condensation: a state as the shortest journal that folds into it, and back.

That journal is a `StateCondensed` and, in the order of the state, each task followed by its
episodes. Payload bytes travel with the episodes that hold them, as they did when those were done.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from treadle_core.tickets import Json, Sampling
from treadle_core.versions import Version, VersionState
from treadle_experience.core.state import (
    Checkpoint,
    Episode,
    EpisodeState,
    Evaluation,
    EvaluationKey,
    Outcome,
    RunState,
    Step,
    Task,
    TaskState,
)
from treadle_experience.core.transitions import EpisodeKept, StateCondensed, TaskKept, Transition


def size(state: RunState) -> int:
    """Transitions that a condensed state is."""
    return 1 + len(state.tasks) + len(state.episodes)


def condense(state: RunState) -> list[Transition]:
    """Transitions that fold into an equal state, and share nothing with it that changes.

    The last of them has the state's position, and the first one is not before the first of a
    journal. So the state must be `size` transitions old at least.
    """
    values = {name: encode(getattr(state, name)) for name, (encode, _) in _CODECS.items()}
    first = StateCondensed(state.position - size(state) + 1, cast("Mapping[str, Json]", values))
    return [first, *_records(state)]


def restore(transition: StateCondensed, state: RunState) -> None:
    """Folds what stands first in a condensed journal; raises ValueError where it is not first.

    A field that it does not name is younger than it, and stays as in an empty state.
    """
    if state.position:
        raise ValueError(transition.position)
    for name, value in transition.values.items():
        setattr(state, name, _CODECS[name][1](value))
    state.position = transition.position - 1  # a fold adds one


def restore_task(transition: TaskKept, state: RunState) -> None:
    """Folds a task of a condensed journal."""
    key = EvaluationKey(transition.evaluated_step, transition.evaluation)
    state.tasks[transition.task_id] = Task(
        task_id=transition.task_id,
        order=transition.order,
        spec=transition.spec,
        episodes=[],
        evaluation=key if key.name else None,
        state=transition.state,
        reason=transition.reason,
        step=transition.step,
    )


def restore_episode(transition: EpisodeKept, state: RunState) -> None:
    """Folds an episode of a condensed journal."""
    task = state.tasks[transition.task_id]
    episode = Episode(
        episode_id=transition.episode_id,
        task_id=transition.task_id,
        index=transition.index,
        state=transition.episode_state,
        attempt=transition.attempt,
        replica_id=transition.replica_id,
        version=transition.version,
        charged=transition.charged,
        spanned=transition.spanned,
        ended=transition.ended,
        result=transition.result,
        # As when it was done: an evaluation's bytes are for readers of the ledger only.
        inline=transition.inline if task.evaluation is None else None,
        released=transition.released,
    )
    task.episodes.append(episode)
    state.episodes[episode.episode_id] = episode


def _records(state: RunState) -> Iterator[Transition]:
    for task in state.tasks.values():
        key = task.evaluation or EvaluationKey(0, "")
        yield TaskKept(
            task_id=task.task_id,
            order=task.order,
            spec=task.spec,
            evaluation=key.name,
            evaluated_step=key.step,
            state=task.state,
            reason=task.reason,
            step=task.step,
        )
        yield from map(_episode, task.episodes)


def _episode(episode: Episode) -> EpisodeKept:
    return EpisodeKept(
        episode_id=episode.episode_id,
        task_id=episode.task_id,
        index=episode.index,
        episode_state=episode.state,
        attempt=episode.attempt,
        replica_id=episode.replica_id,
        version=episode.version,
        charged=episode.charged,
        spanned=episode.spanned,
        ended=episode.ended,
        released=episode.released,
        result=episode.result,
        inline=episode.inline,
    )


def _same(value: Any) -> Any:
    return value


def _row(record: Any) -> list[Any]:
    return [getattr(record, field.name) for field in dataclasses.fields(record)]


def _rows(records: Mapping[Any, Any]) -> list[Any]:
    return [_row(record) for record in records.values()]


def _keys(keys: list[EvaluationKey]) -> list[Any]:
    return [_row(key) for key in keys]


def _to_keys(rows: Any) -> list[EvaluationKey]:
    return [EvaluationKey(*row) for row in rows]


def _version(row: Any) -> Version:
    version = Version(*row)
    return dataclasses.replace(version, state=VersionState(version.state))


def _evaluation_row(evaluation: Evaluation) -> list[Any]:
    outcome = None if evaluation.outcome is None else _row(evaluation.outcome)
    return [
        _row(evaluation.key),
        evaluation.version,
        _row(evaluation.sampling),
        evaluation.size,
        evaluation.exact,
        list(evaluation.waiting),
        evaluation.pending,
        outcome,
    ]


def _evaluation(row: Any) -> Evaluation:
    key, version, sampling, num_tasks, exact, waiting, pending, outcome = row
    return Evaluation(
        EvaluationKey(*key),
        version,
        Sampling(*sampling),
        num_tasks,
        exact,
        list(waiting),
        pending,
        None if outcome is None else Outcome(*outcome),
    )


_Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]
_PLAIN: _Codec = (_same, _same)
_LIST: _Codec = (list, list)
_DICT: _Codec = (dict, dict)
_TASK_COUNTS: _Codec = (dict, lambda value: Counter({TaskState(k): n for k, n in value.items()}))
_KEYS: _Codec = (_keys, _to_keys)

_CODECS: dict[str, _Codec] = {
    "run_id": _PLAIN,
    "settings": _DICT,
    "forgotten_tasks": _TASK_COUNTS,
    "forgotten_results": _TASK_COUNTS,
    "task_counts": _TASK_COUNTS,
    "episode_counts": (
        dict,
        lambda value: Counter({EpisodeState(name): n for name, n in value.items()}),
    ),
    "failures": (dict, Counter),
    "reasons": (dict, Counter),
    "lost_payloads": _PLAIN,
    "payload_bytes": _PLAIN,
    "shown": _DICT,
    "running": (
        lambda value: {replica: list(ids) for replica, ids in value.items()},
        lambda value: {replica: dict.fromkeys(ids) for replica, ids in value.items()},
    ),
    "cursor": _PLAIN,
    "exhausted": _PLAIN,
    "num_opened": _PLAIN,
    "window": _LIST,
    "kept": (sorted, set),
    "waiting": _LIST,
    "steps": (
        lambda value: [[step.step, list(step.task_ids), step.last] for step in value.values()],
        lambda rows: {step: Step(step, tuple(ids), last) for step, ids, last in rows},
    ),
    "forgotten_step": _PLAIN,
    "claimed_through": _LIST,
    "trained_step": _PLAIN,
    "last_step": _PLAIN,
    "closed": _PLAIN,
    "aim": _PLAIN,
    "starved_step": _PLAIN,
    "trainer_epoch": _PLAIN,
    "acquisitions": (
        lambda value: [[*key, epoch] for key, epoch in value.items()],
        lambda rows: {(holder, digest): epoch for holder, digest, epoch in rows},
    ),
    "checkpoints": (_rows, lambda rows: {row[0]: Checkpoint(*row) for row in rows}),
    "lineage": _LIST,
    "released_step": _PLAIN,
    "num_versions": _PLAIN,
    "forgotten_version": _PLAIN,
    "versions": (_rows, lambda rows: {row[0]: _version(row) for row in rows}),
    "version_requests": _DICT,
    "newest_version": _PLAIN,
    "evaluations": (
        lambda value: [_evaluation_row(evaluation) for evaluation in value.values()],
        lambda rows: {each.key: each for each in map(_evaluation, rows)},
    ),
    "unfinished": _KEYS,
    "finished": _KEYS,
    "references": _DICT,
}
"""To JSON and from it, by field of the state; all but `position`, `tasks` and `episodes`."""
