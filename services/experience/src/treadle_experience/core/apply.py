"""The fold: what each transition does to the state. Nothing is decided here."""

import dataclasses
from bisect import bisect_left, insort
from functools import singledispatch

from treadle_core.tickets import Sampling
from treadle_core.versions import Version, VersionState
from treadle_experience.core import transitions as happened
from treadle_experience.core.condensation import restore, restore_episode, restore_task
from treadle_experience.core.errors import LedgerFormatError
from treadle_experience.core.forgetting import forget_history
from treadle_experience.core.pace import after_step
from treadle_experience.core.state import (
    LEFT,
    Cause,
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
from treadle_experience.core.weighing import unweigh, weigh

_LIVE = (EpisodeState.WAITING, EpisodeState.ISSUED)
_IN_WINDOW = (TaskState.OPEN, TaskState.READY)


def apply(state: RunState, transition: happened.Transition) -> None:
    """Folds one transition into `state`.

    Raises LedgerFormatError when it cannot follow what happened before: the journal is damaged.
    """
    try:
        # Without the search of singledispatch, which costs as much as a fold.
        _fold.registry[type(transition)](transition, state)
    except (KeyError, IndexError, ValueError) as error:
        kind = happened.kind_of(transition)
        raise LedgerFormatError(
            f"journal position {state.position + 1}: {kind} does not follow: {error!r}",
            field=kind,
            value=state.position + 1,
        ) from error
    state.position += 1


@singledispatch
def _fold(transition: happened.Transition, state: RunState) -> None:
    raise ValueError(type(transition).__name__)


@_fold.register
def _run_began(transition: happened.RunBegan, state: RunState) -> None:
    state.run_id = transition.run_id
    state.settings = transition.settings
    state.aim = transition.settings["max_lag"] / 2


@_fold.register
def _task_opened(transition: happened.TaskOpened, state: RunState) -> None:
    task_id = transition.task_id
    episodes = [Episode(id_, task_id, i) for i, id_ in enumerate(transition.episode_ids)]
    task = Task(task_id, transition.order, transition.spec, episodes)
    if transition.evaluation:
        task.evaluation = EvaluationKey(transition.step, transition.evaluation)
        evaluation = state.evaluations[task.evaluation]
        evaluation.waiting.append(task.order)
        evaluation.pending += 1
    else:
        state.num_opened = task.order
        state.cursor = transition.cursor
        state.window.append(task.order)
        state.waiting.append(task.order)
    state.tasks[task_id] = task
    for episode in episodes:
        state.episodes[episode.episode_id] = episode
    state.task_counts[TaskState.OPEN] += 1
    state.episode_counts[EpisodeState.WAITING] += len(episodes)


@_fold.register
def _source_exhausted(transition: happened.SourceExhausted, state: RunState) -> None:
    state.cursor = transition.cursor
    state.exhausted = True


@_fold.register
def _ticket_issued(transition: happened.TicketIssued, state: RunState) -> None:
    episode = state.episodes[transition.episode_id]
    episode.attempt = transition.attempt
    episode.replica_id = transition.replica_id
    episode.version = transition.version
    episode.ended = None
    _move_episode(state, episode, EpisodeState.ISSUED)
    state.running.setdefault(episode.replica_id, {})[episode.episode_id] = None
    _index_waiting(state, state.tasks[episode.task_id])


@_fold.register
def _episode_done(transition: happened.EpisodeDone, state: RunState) -> None:
    episode = state.episodes[transition.episode_id]
    _stop(state, episode)
    episode.result = transition.result
    task = state.tasks[episode.task_id]
    # An evaluation is never trained on, so its payloads are for readers of the ledger only.
    episode.inline = transition.inline if task.evaluation is None else None
    episode.released = False
    if task.evaluation is None:
        weigh(state, transition.result)
    for key, _ in transition.result.stored():
        state.references[key] = state.references.get(key, 0) + 1
    _move_episode(state, episode, EpisodeState.DONE)


@_fold.register
def _attempt_ended(transition: happened.AttemptEnded, state: RunState) -> None:
    episode = state.episodes[transition.episode_id]
    _stop(state, episode)
    episode.ended = transition.cause
    episode.charged += transition.charged
    episode.spanned += transition.cause is Cause.SPANNED
    if transition.cause in (Cause.FAILED, Cause.EXPIRED):
        state.failures[transition.failure_class] += 1
    _move_episode(state, episode, EpisodeState.FAILED if transition.final else EpisodeState.WAITING)
    _index_waiting(state, state.tasks[episode.task_id])


@_fold.register
def _task_moved(transition: happened.TaskMoved, state: RunState) -> None:
    task = state.tasks[transition.task_id]
    _move_task(state, task, transition.state)
    task.reason = transition.reason
    if transition.state in LEFT:
        task.spec = {}
        for episode in task.episodes:
            if episode.state in _LIVE:
                _stop(state, episode)
                _move_episode(state, episode, EpisodeState.REVOKED)
    if transition.reason:
        state.reasons[transition.reason] += 1
    _index_waiting(state, task)
    if task.evaluation is not None:
        state.evaluations[task.evaluation].pending -= 1


@_fold.register
def _step_claimed(transition: happened.StepClaimed, state: RunState) -> None:
    if transition.step != state.last_claimed() + 1:
        raise ValueError(transition.step)
    for task_id in transition.task_ids:
        task = state.tasks[task_id]
        _move_task(state, task, TaskState.CLAIMED)
        task.step = transition.step
    total = state.claimed_through[-1] + len(transition.task_ids)
    state.claimed_through.append(total)
    state.steps[transition.step] = Step(transition.step, transition.task_ids, transition.last)
    if transition.last:
        state.last_step = transition.step


@_fold.register
def _trainer_starved(transition: happened.TrainerStarved, state: RunState) -> None:
    state.starved_step = transition.step


@_fold.register
def _episode_lost(transition: happened.EpisodeLost, state: RunState) -> None:
    episode = state.episodes[transition.episode_id]
    task = state.tasks[episode.task_id]
    if task.state is not TaskState.OPEN:
        _move_task(state, task, TaskState.OPEN)
    episode.result = None
    episode.ended = Cause.LOST
    _move_episode(state, episode, EpisodeState.WAITING)
    _index_waiting(state, task)
    state.lost_payloads += 1


@_fold.register
def _step_unclaimed(transition: happened.StepUnclaimed, state: RunState) -> None:
    if transition.step != state.last_claimed():
        raise ValueError(transition.step)
    for task_id in state.steps.pop(transition.step).task_ids:
        task = state.tasks[task_id]
        if task.state not in LEFT:
            task.step = 0
            if task.state is TaskState.CLAIMED:
                _move_task(state, task, TaskState.READY)
            insort(state.window, task.order)
            state.kept.add(task.order)
    state.claimed_through.pop()
    if state.last_step == transition.step:
        state.last_step = None


@_fold.register
def _step_reformed(transition: happened.StepReformed, state: RunState) -> None:
    step, through = transition.step, state.claimed_through
    if transition.task_ids:
        state.steps[step].task_ids = transition.task_ids
        return
    del state.steps[step]
    place = step - state.forgotten_step
    places = through[place] - through[place - 1]
    through[place:] = [total - places for total in through[place + 1 :]]
    for later in range(step + 1, state.last_claimed() + 2):
        moved = state.steps[later - 1] = state.steps.pop(later)
        moved.step = later - 1
        for task_id in moved.task_ids:
            state.tasks[task_id].step = later - 1
    if state.last_step is not None:
        state.last_step -= 1


@_fold.register
def _step_trained(transition: happened.StepTrained, state: RunState) -> None:
    state.trained_step = transition.step
    for task_id in state.steps[transition.step].task_ids:
        _move_task(state, state.tasks[task_id], TaskState.TRAINED)
    max_lag = state.settings["max_lag"]
    state.aim = after_step(state.aim, transition.step, transition.metrics, max_lag)


@_fold.register
def _run_closed(transition: happened.RunClosed, state: RunState) -> None:
    state.closed = True
    state.last_step = transition.last_step


@_fold.register
def _trainer_acquired(transition: happened.TrainerAcquired, state: RunState) -> None:
    state.trainer_epoch = transition.trainer_epoch
    key = (transition.holder, transition.checkpoint_digest)
    state.acquisitions[key] = transition.trainer_epoch
    kept = 0
    if transition.checkpoint_digest:
        kept = state.lineage.index(transition.checkpoint_digest) + 1
    del state.lineage[kept:]
    for step in range(transition.step + 1, state.trained_step + 1):
        for task_id in state.steps[step].task_ids:
            task = state.tasks[task_id]
            if task.state in (TaskState.TRAINED, TaskState.CONSUMED):
                _move_task(state, task, TaskState.CLAIMED)
    state.trained_step = transition.step


@_fold.register
def _checkpoint_committed(transition: happened.CheckpointCommitted, state: RunState) -> None:
    for step in range(state.covered_step() + 1, transition.step + 1):
        for task_id in state.steps[step].task_ids:
            _move_task(state, state.tasks[task_id], TaskState.CONSUMED)
    state.checkpoints[transition.digest] = Checkpoint(
        transition.digest, transition.parent_digest, transition.step, transition.path
    )
    state.lineage.append(transition.digest)
    state.released_step = max(state.released_step, state.restorable()[-1].step)


@_fold.register
def _payloads_released(transition: happened.PayloadsReleased, state: RunState) -> None:
    for episode_id in transition.episode_ids:
        episode = state.episodes[episode_id]
        task = state.tasks[episode.task_id]
        if task.evaluation is None and episode.result is not None:
            unweigh(state, episode.result)
        if task.state is TaskState.CONSUMED:
            task.spec = {}
        episode.inline = None
        episode.released = True
    for key in transition.stored:
        state.references[key] -= 1
        if not state.references[key]:
            del state.references[key]


@_fold.register
def _version_announced(transition: happened.VersionAnnounced, state: RunState) -> None:
    state.num_versions = transition.version
    state.version_requests[transition.request_id] = transition.version
    state.versions[transition.version] = Version(
        number=transition.version,
        step=transition.step,
        trainer_epoch=transition.trainer_epoch,
        parent=state.newest_version,
        trace_id=transition.trace_id,
    )


@_fold.register
def _version_committed(transition: happened.VersionCommitted, state: RunState) -> None:
    state.versions[transition.version] = dataclasses.replace(
        state.versions[transition.version],
        state=VersionState.COMMITTED,
        parent=state.newest_version,
        weights_digest=transition.weights_digest,
    )
    state.newest_version = transition.version


@_fold.register
def _version_aborted(transition: happened.VersionAborted, state: RunState) -> None:
    state.versions[transition.version] = dataclasses.replace(
        state.versions[transition.version], state=VersionState.ABORTED
    )


@_fold.register
def _evaluation_opened(transition: happened.EvaluationOpened, state: RunState) -> None:
    key = EvaluationKey(transition.step, transition.name)
    sampling = Sampling(transition.temperature, transition.max_tokens)
    state.evaluations[key] = Evaluation(
        key, transition.version, sampling, transition.size, transition.exact
    )
    state.unfinished.append(key)


@_fold.register
def _evaluation_scored(transition: happened.EvaluationScored, state: RunState) -> None:
    key = EvaluationKey(transition.step, transition.name)
    state.evaluations[key].outcome = Outcome(
        score=transition.score,
        num_scored=transition.num_scored,
        num_failed=transition.num_failed,
        oldest_version=transition.oldest_version,
        newest_version=transition.newest_version,
    )
    state.unfinished.remove(key)
    state.finished.append(key)


_fold.register(forget_history)
_fold.register(restore)
_fold.register(restore_task)
_fold.register(restore_episode)


def _move_task(state: RunState, task: Task, to: TaskState) -> None:
    in_window = task.evaluation is None and not task.step and task.state in _IN_WINDOW
    if in_window and to not in _IN_WINDOW:
        del state.window[_index(state.window, task.order)]
        state.kept.discard(task.order)
    state.task_counts[task.state] -= 1
    state.task_counts[to] += 1
    task.state = to


def _move_episode(state: RunState, episode: Episode, to: EpisodeState) -> None:
    state.episode_counts[episode.state] -= 1
    state.episode_counts[to] += 1
    episode.state = to


def _stop(state: RunState, episode: Episode) -> None:
    """Takes the episode off its replica."""
    if episode.state is EpisodeState.ISSUED:
        running = state.running[episode.replica_id]
        del running[episode.episode_id]
        if not running:
            del state.running[episode.replica_id]


def _index_waiting(state: RunState, task: Task) -> None:
    """Keeps the index of tasks with something to issue true for `task`."""
    evaluation = task.evaluation
    orders = state.waiting if evaluation is None else state.evaluations[evaluation].waiting
    place = bisect_left(orders, task.order)
    listed = place < len(orders) and orders[place] == task.order
    wanted = task.state is TaskState.OPEN and any(
        episode.state is EpisodeState.WAITING for episode in task.episodes
    )
    if wanted and not listed:
        insort(orders, task.order)
    elif listed and not wanted:
        del orders[place]


def _index(orders: list[int], order: int) -> int:
    place = bisect_left(orders, order)
    if place == len(orders) or orders[place] != order:
        raise ValueError(order)
    return place
