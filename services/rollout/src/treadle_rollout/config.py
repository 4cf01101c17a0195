"""What the rollout service is told. Imports nothing heavy."""

from typing import Annotated

from pydantic import AfterValidator, Field

from treadle_core.episodes import MAX_REWARD
from treadle_runtime.config import Addresses, ServiceConfig
from treadle_runtime.plugins import PluginConfig, of_group


class RolloutConfig(ServiceConfig):
    """One engine, the agents that use it, and its peers."""

    experience_address: Addresses
    """Address of the experience service, or those of all processes that may serve it."""
    refit_address: str
    """Address of the refit service."""
    engine: Annotated[PluginConfig, AfterValidator(of_group("treadle.engines"))]
    """Plugin of `treadle.engines`; it is given the run's `model` and `seed`, and `slots`."""
    agent: Annotated[PluginConfig, AfterValidator(of_group("treadle.agents"))]
    """Plugin of `treadle.agents`: an Env."""
    transport: Annotated[PluginConfig, AfterValidator(of_group("treadle.weight_transports"))] = (
        PluginConfig(name="shared_memory")
    )
    """Plugin of `treadle.weight_transports`; the same as refit's and the trainer's."""
    slots: int = Field(ge=1, le=4096)
    """Episodes that run at once."""
    workers: int = Field(default=1, ge=1, le=256)
    """Processes that agents run in; each hosts its share of the slots."""
    max_turns: int = Field(ge=1)
    """Turns after which an episode is truncated."""
    failure_reward: float | None = Field(default=None, ge=-MAX_REWARD, le=MAX_REWARD)
    """Reward of an episode that the policy failed; none: a failed attempt, which is retried."""
    grace_s: float = Field(default=20.0, ge=0, le=25)
    """Seconds that running episodes get when the replica drains; then they are handed back. Less
    than the 35 s after which `treadle train` kills a service, with 10 s to spare."""
