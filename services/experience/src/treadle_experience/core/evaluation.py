"""Evaluations: when one is due, and what it says once all its tasks have an outcome."""

from collections.abc import Iterator, Mapping

from treadle_core.ids import episode_id
from treadle_core.tickets import Json
from treadle_core.versions import Version
from treadle_experience.core.errors import TaskSourceError
from treadle_experience.core.rules import EvaluationSet
from treadle_experience.core.run import Run, read_task
from treadle_experience.core.state import (
    Episode,
    Evaluation,
    EvaluationKey,
    RunState,
    Task,
    TaskState,
    evaluation_task_id,
)
from treadle_experience.core.transitions import (
    EvaluationOpened,
    EvaluationScored,
    TaskMoved,
    TaskOpened,
)

INEXACT = "inexact"
"""No attempt at an episode of an exact evaluation stayed on the parameters that are scored."""


def open_due(run: Run) -> None:
    """Opens the evaluations that the newest committed version is due for."""
    state, rules = run.state, run.rules.evaluation
    version = state.versions.get(state.newest_version)
    if rules is None or version is None:
        return
    step = version.step
    if step and step % rules.every and step != state.last_step:
        return
    for chosen in rules.sets:
        if EvaluationKey(step, chosen.name) not in state.evaluations:
            _open(run, chosen, version)


def end_beyond(run: Run, last_step: int, reason: str) -> None:
    """Ends evaluations of steps that the run will not reach again, with what they have."""
    for key in list(run.state.unfinished):
        if key.step > last_step:
            for task in _tasks(run.state, run.state.evaluations[key]):
                if task.state is TaskState.OPEN:
                    run.record(TaskMoved(task.task_id, TaskState.FILTERED, reason))
            close_if_done(run, key)


def end_overtaken(run: Run, version: Version) -> None:
    """Ends what is left of exact evaluations that a replica with `version` has left behind.

    Engines do not go back, so that nobody can be relied on to run it.
    """
    state = run.state
    for key in list(state.unfinished):
        evaluation = state.evaluations[key]
        if not evaluation.exact or version.number < evaluation.version:
            continue
        if is_exact(state, evaluation, version):
            continue
        for order in list(evaluation.waiting):
            task_id = evaluation_task_id(key, order)
            run.record(TaskMoved(task_id, TaskState.FILTERED, INEXACT))
        close_if_done(run, key)


def is_exact(state: RunState, evaluation: Evaluation, version: Version) -> bool:
    """Whether `version` stands for the very parameters that are scored."""
    return version.weights_digest == state.versions[evaluation.version].weights_digest


def close_if_done(run: Run, key: EvaluationKey) -> None:
    """Records the outcome of an evaluation whose last task got one."""
    evaluation = run.state.evaluations[key]
    if evaluation.pending or evaluation.outcome:
        return
    scored = rewards(run.state, evaluation)
    versions: set[int] = set()
    for episode in _episodes(run.state, evaluation):
        if episode.result is not None:
            versions |= set(episode.result.versions)
    run.record(
        EvaluationScored(
            name=key.name,
            step=key.step,
            score=sum(scored) / len(scored) if scored else None,
            num_scored=len(scored),
            num_failed=evaluation.size - len(scored),
            oldest_version=min(versions, default=0),
            newest_version=max(versions, default=0),
        )
    )


def rewards(state: RunState, evaluation: Evaluation) -> list[float]:
    """Those of its episodes that have one, in the order of the tasks."""
    results = [episode.result for episode in _episodes(state, evaluation)]
    return [each.reward for each in results if each is not None and each.reward is not None]


def final_is_scored(run: Run) -> bool:
    """Whether every evaluation is finished, those of the last step included."""
    state, rules = run.state, run.rules.evaluation
    if state.unfinished or state.last_step is None:
        return False
    names = [chosen.name for chosen in rules.sets] if rules else []
    return all(EvaluationKey(state.last_step, name) in state.evaluations for name in names)


def _open(run: Run, chosen: EvaluationSet, version: Version) -> None:
    specs = list(_read_all(run, chosen))
    if not specs:
        raise TaskSourceError(
            f"the source of evaluation set {chosen.name!r} has no task",
            field=f"evaluation.sets.{chosen.name}",
            limit="at least one task",
            value=0,
        )
    sampling = chosen.sampling
    key = EvaluationKey(version.step, chosen.name)
    run.record(
        EvaluationOpened(
            name=key.name,
            step=key.step,
            version=version.number,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            size=len(specs),
            exact=chosen.exact,
        )
    )
    for order, spec in enumerate(specs, start=1):
        task_id = evaluation_task_id(key, order)
        ids = (episode_id(run.rules.run_id, task_id, 0),)
        run.record(TaskOpened(task_id, order, order, spec, ids, key.name, key.step))


def _read_all(run: Run, chosen: EvaluationSet) -> Iterator[Mapping[str, Json]]:
    for cursor in range(chosen.limit):
        spec = read_task(run, chosen.name, cursor)
        if spec is None:
            return
        yield spec


def _episodes(state: RunState, evaluation: Evaluation) -> Iterator[Episode]:
    for task in _tasks(state, evaluation):
        if task.state is TaskState.SCORED:
            yield task.episodes[0]


def _tasks(state: RunState, evaluation: Evaluation) -> Iterator[Task]:
    """Those that are not forgotten: all, until it is finished."""
    for order in range(1, evaluation.size + 1):
        task = state.tasks.get(evaluation_task_id(evaluation.key, order))
        if task is not None:
            yield task
