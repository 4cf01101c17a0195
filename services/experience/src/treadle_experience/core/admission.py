"""Lag as admission control: who may run what, so that nothing is sampled too early.

Let `s` be the step of the version that a replica serves, and let the tasks ahead of a task be the
open and ready ones with an older first ticket, plus all members of steps beyond `s`. Claims take
tasks in the order of their first ticket, `tasks_per_step` a step, so a task with `n` tasks ahead is
trained by step `s + n // tasks_per_step + 1` at the latest. With `n` below
`(max_lag + 1) * tasks_per_step` its tokens of step `s` are trained at most `max_lag` steps late.
"""

from bisect import bisect_left

from treadle_core.versions import Version
from treadle_experience.core.evaluation import is_exact
from treadle_experience.core.rules import Rules
from treadle_experience.core.state import RunState, Task


def tasks_beyond(state: RunState, step: int) -> int:
    """Members of the steps after `step`: claimed, trained or consumed.

    Of a step that is forgotten, as many as are known: more than any admission allows.
    """
    through = state.claimed_through
    known = min(max(step - state.forgotten_step, 0), len(through) - 1)
    return through[-1] - through[known]


def tasks_ahead(state: RunState, task: Task, step: int) -> int:
    """Tasks that will be trained before the open or ready `task`, as seen from `step`."""
    return bisect_left(state.window, task.order) + tasks_beyond(state, step)


def may_open(state: RunState, rules: Rules, step: int) -> bool:
    """Whether a replica that serves `step` may open one more training task."""
    if state.closed or state.exhausted or baseline_is_pending(state):
        return False
    occupied = len(state.window)
    # A task that no remaining step can take would be sampled only to be evicted.
    usable = (rules.steps - state.last_claimed()) * rules.tasks_per_step
    if occupied >= usable:
        return False
    size = rules.bound if _is_starved(state, rules) else rules.window_size(state.aim)
    return occupied + tasks_beyond(state, step) < size


def _is_starved(state: RunState, rules: Rules) -> bool:
    """Whether the trainer waits for a step that an adaptive window has too few tasks for.

    Such a window would stay closed where versions come only after more steps than it allows.
    """
    return (
        state.starved_step == state.last_claimed() + 1 and len(state.window) < rules.tasks_per_step
    )


def may_run(state: RunState, rules: Rules, task: Task, version: Version) -> bool:
    """Whether a replica that serves `version` may run, or go on running, an open task."""
    if task.evaluation is not None:
        # After a restore a newer version may stand for an older step.
        evaluation = state.evaluations[task.evaluation]
        if evaluation.exact:
            return is_exact(state, evaluation, version)
        return version.number >= evaluation.version and version.step >= evaluation.key.step
    if task.step:
        return task.step - 1 - version.step <= rules.max_lag
    return tasks_ahead(state, task, version.step) < rules.bound


def may_finish(state: RunState, rules: Rules, task: Task, version: Version) -> bool:
    """Whether tokens of `version` in an open task can still be trained on.

    As `may_run`, but for a task that was passed over, which may lag further.
    """
    if may_run(state, rules, task, version):
        return True
    if task.evaluation is not None or task.step or rules.max_overdue_lag is None:
        return False
    ahead = bisect_left(state.window, task.order)
    trained_by = state.last_claimed() + ahead // rules.tasks_per_step + 1
    return trained_by - 1 - version.step <= rules.max_overdue_lag


def baseline_is_pending(state: RunState) -> bool:
    """Whether step 0 is still being scored: training waits, so that the baseline is exact."""
    return any(key.step == 0 for key in state.unfinished)
