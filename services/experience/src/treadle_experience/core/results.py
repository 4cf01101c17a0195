"""Results: what finishing an episode does to it, to its task and to its evaluation."""

from collections.abc import Sequence

from treadle_core.versions import Version
from treadle_experience.core import admission, evaluation, groups
from treadle_experience.core.errors import ResultConflictError
from treadle_experience.core.run import Run, committed_version
from treadle_experience.core.state import (
    Attempt,
    Cause,
    Episode,
    Result,
    RunState,
    Task,
)
from treadle_experience.core.tickets import end_attempt, find, is_held, stale
from treadle_experience.core.transitions import EpisodeDone


def complete(
    run: Run, *, replica_id: str, attempt: Attempt, result: Result, inline: bytes | None
) -> bool:
    """Records the result of an attempt; whether it was recorded before.

    One that cannot be used, by an exact evaluation or by the lag bound, ends its attempt uncharged
    and is refused as stale: an answer that is no error means that the result is kept.

    Raises UnknownEpisodeError, StaleAttemptError, ResultConflictError or UnknownVersionError.
    """
    state = run.state
    episode = find(state, attempt)
    if episode.attempt == attempt.attempt and episode.result is not None:
        _check_same(episode, result)
        return True
    if not is_held(state, replica_id, attempt):
        raise stale(episode, attempt)
    versions = [committed_version(state, "versions", number) for number in result.versions]
    task = state.tasks[episode.task_id]
    if task.evaluation is not None and not _is_exact(state, task, versions):
        end_attempt(run, episode, Cause.SPANNED)
        raise stale(episode, attempt)
    if not all(admission.may_finish(state, run.rules, task, version) for version in versions):
        # The replica went back to an older step and this is the first that we hear of it.
        end_attempt(run, episode, Cause.RESTORED)
        raise stale(episode, attempt)
    run.record(EpisodeDone(episode.episode_id, episode.attempt, result, inline))
    groups.settle(run, task)
    return False


def _is_exact(state: RunState, task: Task, versions: Sequence[Version]) -> bool:
    """Whether a result counts in the evaluation of `task`, by the versions of its tokens."""
    evaluated = state.evaluations[task.evaluation] if task.evaluation else None
    return (
        evaluated is None
        or not evaluated.exact
        or all(evaluation.is_exact(state, evaluated, version) for version in versions)
    )


def _check_same(episode: Episode, result: Result) -> None:
    recorded = episode.result
    if recorded is not None and recorded.sha256 != result.sha256:
        raise ResultConflictError(
            f"episode {episode.episode_id}: attempt {episode.attempt} is recorded with another "
            "payload",
            field="payload.sha256",
            limit=recorded.sha256,
            value=result.sha256,
        )
