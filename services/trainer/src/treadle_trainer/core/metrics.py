"""The numbers of a step. docs/metrics.md lists them with their units."""

from treadle_trainer.core.claims import Claim
from treadle_trainer.core.step import StepResult


def step_metrics(claim: Claim, result: StepResult, *, step: int) -> dict[str, float]:
    """What can be told from the batch and the update; a mean over nothing is left out."""
    episodes = claim.episodes
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    lags = [step - 1 - episode.oldest_step for episode in episodes]
    metrics: dict[str, float] = {
        "num_episodes": len(episodes),
        "missing_rewards": len(episodes) - len(rewards),
        "zero_variance_groups": result.num_silent,
        "media_segments": result.num_media,
        "tokens": sum(episode.num_tokens for episode in episodes),
        "trained_tokens": result.num_trained,
        "microbatches": result.num_microbatches,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lag_mean": sum(lags) / len(lags),
        "lag_max": max(lags),
    }
    if rewards:
        metrics["reward"] = sum(rewards) / len(rewards)
    if result.reward_shaped is not None:
        metrics["reward_shaped"] = result.reward_shaped
    if result.num_trained:
        metrics |= {name: value / result.num_trained for name, value in result.sums.items()}
        metrics |= result.spreads
    return metrics
