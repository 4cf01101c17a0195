"""Tickets: leasing them, and every way in which an attempt ends without a result."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from treadle_core.episodes import FailureClass
from treadle_core.ids import episode_id
from treadle_core.tickets import Sampling, Ticket
from treadle_core.versions import Version
from treadle_experience.core import admission, evaluation, groups
from treadle_experience.core.errors import StaleAttemptError, UnknownEpisodeError
from treadle_experience.core.run import TRAINING, Run, committed_version, read_task
from treadle_experience.core.state import (
    Attempt,
    Cause,
    Episode,
    EpisodeState,
    RunState,
    Task,
    evaluation_task_id,
    training_task_id,
)
from treadle_experience.core.transitions import (
    AttemptEnded,
    SourceExhausted,
    TaskOpened,
    TicketIssued,
)

MESSAGE_LIMIT = 4096
"""Characters that are kept of a failure's message."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a replica says about an attempt that failed."""

    failure_class: FailureClass
    message: str
    traceparent: str = ""


def lease(
    run: Run, *, replica_id: str, served_version: int, max_tickets: int, slots: int
) -> list[Ticket]:
    """Issues up to `max_tickets` tickets: evaluation within its share, then oldest task first.

    A replica that serves nothing yet, `served_version` 0, gets none. Raises UnknownVersionError.
    """
    if not served_version:
        return []
    version = committed_version(run.state, "served_version", served_version)
    end_forbidden(run, replica_id, version)
    evaluation.end_overtaken(run, version)
    room = min(max_tickets, _evaluation_room(run, replica_id, slots))
    tickets = [
        _issue(run, episode, replica_id, version)
        for episode in _evaluation_episodes(run, version, room)
    ]
    while len(tickets) < max_tickets:
        found = _next_training(run, version)
        if found is None:
            break
        tickets.append(_issue(run, found, replica_id, version))
    return tickets


def renew(
    run: Run, *, replica_id: str, served_version: int, attempts: Sequence[Attempt]
) -> tuple[list[Attempt], list[Attempt]]:
    """Which attempts are still leased to the replica, and which it must stop.

    `served_version` 0 means that the replica serves nothing now. Raises UnknownVersionError.
    """
    if served_version:
        version = committed_version(run.state, "served_version", served_version)
        end_forbidden(run, replica_id, version)
    held: list[Attempt] = []
    revoked: list[Attempt] = []
    for attempt in attempts:
        mine = is_held(run.state, replica_id, attempt)
        (held if mine else revoked).append(attempt)
    return held, revoked


def give_back(run: Run, *, replica_id: str, attempts: Iterable[Attempt]) -> None:
    """Puts attempts that a draining replica will not finish back; no retry is charged."""
    for attempt in attempts:
        if is_held(run.state, replica_id, attempt):
            end_attempt(run, run.state.episodes[attempt.episode_id], Cause.RETURNED)


def expire(run: Run, attempts: Iterable[Attempt]) -> None:
    """Ends attempts whose lease or deadline ran out."""
    for attempt in attempts:
        episode = run.state.episodes[attempt.episode_id]
        if episode.state is EpisodeState.ISSUED and episode.attempt == attempt.attempt:
            lost = Failure(FailureClass.INFRASTRUCTURE, "the lease or the deadline ran out")
            end_attempt(run, episode, Cause.EXPIRED, lost)


def fail(run: Run, *, replica_id: str, attempt: Attempt, failure: Failure) -> bool:
    """Ends an attempt that failed; whether the episode will be issued again.

    Raises UnknownEpisodeError or StaleAttemptError.
    """
    episode = find(run.state, attempt)
    if episode.attempt == attempt.attempt and episode.ended is Cause.FAILED:
        return episode.state is EpisodeState.WAITING
    if not is_held(run.state, replica_id, attempt):
        raise stale(episode, attempt)
    end_attempt(run, episode, Cause.FAILED, failure)
    return episode.state is EpisodeState.WAITING


def find(state: RunState, attempt: Attempt) -> Episode:
    """The episode of an attempt that was issued; raises UnknownEpisodeError otherwise."""
    episode = state.episodes.get(attempt.episode_id)
    if episode is None or attempt.attempt > episode.attempt:
        raise UnknownEpisodeError(
            f"episode {attempt.episode_id}: attempt {attempt.attempt} was never issued, or it is "
            "settled and forgotten",
            field="attempt",
            limit=episode.attempt if episode else "an issued episode",
            value=attempt.attempt,
        )
    return episode


def stale(episode: Episode, attempt: Attempt) -> StaleAttemptError:
    """The refusal of an attempt that does not count any more."""
    return StaleAttemptError(
        f"episode {episode.episode_id}: attempt {attempt.attempt} has ended "
        f"(attempt {episode.attempt}, {episode.state.value})",
        field="attempt",
        limit=episode.attempt,
        value=attempt.attempt,
    )


def end_forbidden(run: Run, replica_id: str, version: Version) -> None:
    """Ends the attempts that a replica may not go on with, now that it serves an older step.

    Numbers rise on every replica: one below that of the lease comes from a late request, which says
    nothing of what is served now.
    """
    state = run.state
    for id_ in list(state.running.get(replica_id, ())):
        episode = state.episodes[id_]
        leased = state.version(episode.version)
        went_back = leased and version.number > leased.number and version.step < leased.step
        if went_back and not admission.may_finish(
            state, run.rules, state.tasks[episode.task_id], version
        ):
            end_attempt(run, episode, Cause.RESTORED)


def end_attempt(run: Run, episode: Episode, cause: Cause, failure: Failure | None = None) -> None:
    """Ends an issued attempt without a result, and its task where that was the last retry."""
    charged = cause in (Cause.FAILED, Cause.EXPIRED)
    spent = episode.spanned if cause is Cause.SPANNED else episode.charged
    final = (charged or cause is Cause.SPANNED) and spent >= run.rules.retries
    run.record(
        AttemptEnded(
            episode_id=episode.episode_id,
            attempt=episode.attempt,
            cause=cause,
            charged=charged,
            final=final,
            failure_class=failure.failure_class.value if failure else "",
            message=failure.message[:MESSAGE_LIMIT] if failure else "",
            traceparent=failure.traceparent if failure else "",
        )
    )
    if final:
        groups.settle(run, run.state.tasks[episode.task_id])


def _evaluation_room(run: Run, replica_id: str, slots: int) -> int:
    """Slots of the replica that evaluation may take beyond those it has."""
    state, rules = run.state, run.rules.evaluation
    if rules is None or not state.unfinished:
        return 0
    alone = state.closed or admission.baseline_is_pending(state)
    share = slots if alone else math.ceil(rules.share * slots)
    running = state.running.get(replica_id, {})
    taken = sum(state.tasks[state.episodes[id_].task_id].evaluation is not None for id_ in running)
    return max(0, share - taken)


def _evaluation_episodes(run: Run, version: Version, room: int) -> list[Episode]:
    """Up to `room` waiting evaluation episodes that a replica with `version` may run."""
    found: list[Episode] = []
    for key in run.state.unfinished:
        orders = run.state.evaluations[key].waiting[: room - len(found)]
        tasks = [run.state.tasks[evaluation_task_id(key, order)] for order in orders]
        if tasks and admission.may_run(run.state, run.rules, tasks[0], version):
            found += [task.episodes[0] for task in tasks]
    return found


def _next_training(run: Run, version: Version) -> Episode | None:
    """The next training episode for a replica that serves `version`, oldest task first."""
    state = run.state
    for task in map(state.task_of, state.waiting):
        if admission.may_run(state, run.rules, task, version):
            return next(e for e in task.episodes if e.state is EpisodeState.WAITING)
        if not task.step:  # more tasks are ahead of every further one
            return None
    if not admission.may_open(state, run.rules, version.step):
        return None
    task = _open_next(run)
    return task.episodes[0] if task else None


def _open_next(run: Run) -> Task | None:
    """Opens the task at the source's cursor; None when there is none."""
    state = run.state
    spec = read_task(run, TRAINING, state.cursor)
    if spec is None:
        run.record(SourceExhausted(state.cursor))
        return None
    order = state.num_opened + 1
    task_id = training_task_id(order)
    size = run.rules.group_size
    ids = tuple(episode_id(run.rules.run_id, task_id, index) for index in range(size))
    run.record(TaskOpened(task_id, order, state.cursor + 1, spec, ids))
    # Looking ahead tells the trainer at the claim of a last batch that it is the last.
    if read_task(run, TRAINING, state.cursor) is None:
        run.record(SourceExhausted(state.cursor))
    return state.tasks[task_id]


def _issue(run: Run, episode: Episode, replica_id: str, version: Version) -> Ticket:
    run.record(TicketIssued(episode.episode_id, episode.attempt + 1, replica_id, version.number))
    task = run.state.tasks[episode.task_id]
    return Ticket(
        episode_id=episode.episode_id,
        attempt=episode.attempt,
        task_id=task.task_id,
        index=episode.index,
        spec=task.spec,
        sampling=_sampling(run, task),
        deadline_s=run.rules.deadline_s,
        evaluation=task.evaluation.name if task.evaluation else "",
    )


def _sampling(run: Run, task: Task) -> Sampling:
    if task.evaluation is None:
        return run.rules.sampling
    return run.state.evaluations[task.evaluation].sampling


def is_held(state: RunState, replica_id: str, attempt: Attempt) -> bool:
    """Whether the replica has the lease of this attempt."""
    episode = state.episodes.get(attempt.episode_id)
    return (
        episode is not None
        and episode.state is EpisodeState.ISSUED
        and episode.attempt == attempt.attempt
        and episode.replica_id == replica_id
    )
