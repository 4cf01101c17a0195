"""What the rollout service is told. Imports nothing heavy."""

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from treadle_core.episodes import MAX_REWARD
from treadle_core.media import MAX_MEDIA
from treadle_gateway.capture.labels import LABELS
from treadle_runtime.config import Addresses, Config, ServiceConfig
from treadle_runtime.plugins import PluginConfig, of_group
from treadle_runtime.spelling import did_you_mean

EXTERNAL = "external"
"""The agent that nobody plays here."""


class GatewayConfig(Config):
    """Where agents that talk by themselves find the policy."""

    host: str = "127.0.0.1"
    """Address to listen on; beyond loopback only with a certificate or `run.insecure_dev`."""
    port: int = Field(default=0, ge=0, le=65535)
    """Of the first worker, the others follow; 0: each as the system chooses."""
    advertise: str = ""
    """Host name in the URLs that agents are given; empty: `host`."""
    certificate: Path | None = None
    """Chain of certificates, PEM; with it the gateway speaks HTTPS."""
    private_key: Path | None = None
    """Of the certificate, PEM."""
    workers: int = Field(default=1, ge=1, le=256)
    """Processes that requests are answered in; sessions spread."""
    model_name: str = Field(default="policy", min_length=1)
    """The one name that the policy has for clients."""
    other_sampling: Literal["refuse", "untrained", "recipe"] = "refuse"
    """What becomes of a request whose sampling is not the recipe's: refused with the parameter's
    name; sampled so and not trained on; sampled as the recipe says. All are counted."""
    trained: list[str] = Field(default=list(LABELS), min_length=1)
    """Labels of the turns that are trained, of `treadle_gateway.capture.labels.LABELS`; the tokens
    of the others are context."""
    max_requests: int = Field(default=512, ge=1)
    """Requests of an episode; more are refused."""
    max_concurrent: int = Field(default=32, ge=1)
    """Requests of an episode that run at once; more are refused for now."""
    max_sampled: int = Field(default=10_000_000, ge=1)
    """Tokens that an episode may sample."""
    max_images: int = Field(default=MAX_MEDIA, ge=0, le=MAX_MEDIA)
    """Images that an episode may show the policy, each content once; more are refused."""
    max_image_bytes: int = Field(default=128 * 1024 * 1024, ge=0)
    """Bytes of these images together."""
    run_token_file: Path | None = None
    """File with the token by which clients take episodes of agent `external`."""
    run_token_env: str = ""
    """Environment variable with that token."""

    @field_validator("trained")
    @classmethod
    def _known_labels(cls, labels: list[str]) -> list[str]:
        for label in labels:
            if label not in LABELS:
                raise ValueError(f"no label {label!r}{did_you_mean(label, LABELS)}")
        return labels

    @model_validator(mode="after")
    def _of_one_mind(self) -> Self:
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("certificate: expected with private_key, got one of them")
        if self.port and self.port + self.workers - 1 > 65535:
            limit = 65536 - self.workers
            raise ValueError(f"port: expected at most {limit}, since workers take the next ones")
        if self.run_token_file and self.run_token_env:
            raise ValueError("run_token_file: expected alone, got run_token_env too")
        return self

    @property
    def run_token(self) -> str:
        """The token by which episodes are taken; empty where nobody may.

        Raises ValueError naming the key where it is not where the recipe says.
        """
        if self.run_token_file is not None:
            try:
                token = self.run_token_file.read_text(encoding="utf-8").strip()
            except OSError as error:
                raise ValueError(f"run_token_file: {error}") from error
            return _long_enough("run_token_file", token)
        if self.run_token_env:
            return _long_enough("run_token_env", os.environ.get(self.run_token_env, ""))
        return ""


class RolloutConfig(ServiceConfig):
    """One engine, the agents that use it, and its peers."""

    experience_address: Addresses
    """Address of the experience service, or those of all processes that may serve it."""
    refit_address: str
    """Address of the refit service."""
    engine: Annotated[PluginConfig, AfterValidator(of_group("treadle.engines"))]
    """Plugin of `treadle.engines`; it is given the run's `model` and `seed`, and `slots`."""
    agent: Annotated[PluginConfig, AfterValidator(of_group("treadle.agents"))]
    """Plugin of `treadle.agents`: an Env, a ChatAgent, or `external`."""
    gateway: GatewayConfig | None = None
    """Where a ChatAgent and clients of `external` find the policy; it serves where the agent needs
    it, and wherever a recipe has this section."""
    transport: Annotated[PluginConfig, AfterValidator(of_group("treadle.weight_transports"))] = (
        PluginConfig(name="shared_memory")
    )
    """Plugin of `treadle.weight_transports`; the same as refit's and the trainer's."""
    slots: int = Field(ge=1, le=4096)
    """Episodes that run at once."""
    workers: int = Field(default=1, ge=1, le=256)
    """Processes that agents run in; each hosts its share of the slots."""
    max_turns: int = Field(ge=1)
    """Turns after which an Env's episode is truncated."""
    failure_reward: float | None = Field(default=None, ge=-MAX_REWARD, le=MAX_REWARD)
    """Reward of an episode that the policy failed; none: a failed attempt, which is retried."""
    grace_s: float = Field(default=20.0, ge=0, le=25)
    """Seconds that running episodes get when the replica drains; then they are handed back. Less
    than the 35 s after which `treadle train` kills a service, with 10 s to spare."""

    @model_validator(mode="after")
    def _gateway_in_the_open(self) -> Self:
        gateway = self.gateway
        if gateway is None or self.run.insecure_dev or gateway.certificate is not None:
            return self
        if not _on_loopback(gateway.host):
            raise ValueError(
                f"gateway.host: expected loopback, or a certificate, got {gateway.host} "
                "(run.insecure_dev allows it, on a private network)"
            )
        return self


_LEAST_TOKEN = 16
"""Characters of a run token that is no guess."""


def _long_enough(key: str, token: str) -> str:
    if len(token) < _LEAST_TOKEN:
        raise ValueError(f"{key}: expected at least {_LEAST_TOKEN} characters, got {len(token)}")
    return token


def _on_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
