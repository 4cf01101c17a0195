"""Configuration of the refit service."""

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from treadle_runtime.config import Addresses, ServiceConfig
from treadle_runtime.plugins import PluginConfig, of_group

TransportConfig = Annotated[PluginConfig, AfterValidator(of_group("treadle.weight_transports"))]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RefitConfig(ServiceConfig):
    """The section `refit` of a recipe, where the service listens, and its peer."""

    experience_address: Addresses
    """Address of the experience service."""
    verify_timeout_s: Seconds = 20.0
    """After so long a version is committed without the engines that have not verified it."""
    dead_after_s: Seconds = 15.0
    """An engine that was silent for so long is dead."""
    send_timeout_s: Seconds = 60.0
    """A version whose trainer was silent for so long is aborted."""
    transport: TransportConfig = PluginConfig(name="shared_memory")
    """Plugin of `treadle.weight_transports`; the same in trainer and rollout."""

    @model_validator(mode="after")
    def _death_is_known_before_time_is_up(self) -> Self:
        if self.verify_timeout_s <= self.dead_after_s:
            raise ValueError(
                f"verify_timeout_s: expected more than dead_after_s {self.dead_after_s:g}, got "
                f"{self.verify_timeout_s:g}: every engine would be left behind before it is known "
                "which are dead"
            )
        return self
