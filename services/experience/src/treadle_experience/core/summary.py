"""The run in numbers, as `GetRun` tells it."""

from dataclasses import dataclass

from treadle_experience.core.run import Run
from treadle_experience.core.state import Checkpoint, EvaluationKey, Outcome
from treadle_experience.core.steps import is_complete


@dataclass(frozen=True, slots=True)
class Summary:
    """A snapshot of a run; names as in the proto."""

    position: int
    checkpoints: list[Checkpoint]
    tasks: dict[str, int]
    episodes: dict[str, int]
    failures: dict[str, int]
    trained_step: int
    version: int
    version_step: int
    version_digest: str
    evaluations: list[tuple[EvaluationKey, Outcome]]
    complete: bool
    last_step: int
    reasons: dict[str, int]
    lost_payloads: int
    window_lag: int


def summarise(run: Run) -> Summary:
    """What the run is now."""
    state = run.state
    newest = state.versions.get(state.newest_version)
    outcomes = [(key, state.evaluations[key].outcome) for key in state.finished]
    return Summary(
        position=state.position,
        checkpoints=state.restorable(),
        tasks={name.value: count for name, count in state.task_counts.items() if count},
        episodes={name.value: count for name, count in state.episode_counts.items() if count},
        failures=dict(state.failures),
        trained_step=state.trained_step,
        version=state.newest_version,
        version_step=newest.step if newest else 0,
        version_digest=newest.weights_digest if newest else "",
        evaluations=[(key, outcome) for key, outcome in outcomes if outcome is not None],
        complete=is_complete(run),
        last_step=state.last_step or 0,
        reasons=dict(state.reasons),
        lost_payloads=state.lost_payloads,
        window_lag=(run.rules.window_size(state.aim) - 1) // run.rules.tasks_per_step,
    )
