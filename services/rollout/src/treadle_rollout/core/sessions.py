"""What an episode is worth where its agent and its client both may say so."""

from treadle_agents.loop import Outcome
from treadle_core.episodes import Termination
from treadle_gateway import terms


def joined(outcome: Outcome | None, reported: terms.Outcome | None) -> Outcome:
    """The agent's word stands where it gave a reward; else the one that ended the session.

    Args:
        outcome: of an agent in our workers; None where there was none.
        reported: what was said over HTTP at the end of the session; None where nothing was.
    """
    if reported is None:
        return outcome or Outcome(None, Termination.FINISHED, {}, ())
    theirs = Outcome(
        reward=reported.reward if reported.reward is not None else _sum(reported.turn_rewards),
        termination=Termination.TRUNCATED if reported.truncated else Termination.FINISHED,
        metrics=reported.metrics,
        turn_rewards=reported.turn_rewards,
    )
    if outcome is None:
        return theirs
    if outcome.reward is not None:
        return Outcome(
            outcome.reward, outcome.termination, {**theirs.metrics, **outcome.metrics}, ()
        )
    cut = Termination.TRUNCATED in (outcome.termination, theirs.termination)
    return Outcome(
        reward=theirs.reward,
        termination=Termination.TRUNCATED if cut else outcome.termination,
        metrics={**theirs.metrics, **outcome.metrics},
        turn_rewards=theirs.turn_rewards,
    )


def _sum(rewards: tuple[float, ...]) -> float | None:
    return sum(rewards) if rewards else None
