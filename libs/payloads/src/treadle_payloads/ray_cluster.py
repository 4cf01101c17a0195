"""Joining a Ray cluster.

A process that joins becomes a driver of Ray, and Ray ends its drivers: when the raylet's socket
breaks, and 60 s after the head is gone. So only children whose death costs nothing join
(`ray_tender`, `ray_reader`), and nothing else of this package imports ray.

Ray takes its token from the environment (`RAY_AUTH_MODE=token`, `RAY_AUTH_TOKEN` or
`RAY_AUTH_TOKEN_PATH`).
"""

import logging
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Self

from pydantic import Field, model_validator

from treadle_runtime.config import LOOPBACK, Config

END = b"end"
"""What a sidecar tells its tender when it is done for good."""


class RayConfig(Config):
    """The Ray cluster that a node's payloads are read through."""

    address: str = Field(pattern=r"^.+:[0-9]+$")
    """Of the cluster's head, `host:port`."""
    namespace: str = ""
    """Of the actors; the run's id when empty."""
    bytes: int = Field(default=1 << 30, ge=1)
    """Most that the owner of a node keeps in the object store; less than the store has."""

    @model_validator(mode="after")
    def _installed(self) -> Self:
        if find_spec("ray") is None:
            raise ValueError("needs the package ray: pip install 'treadle-payloads[ray]'")
        return self

    @classmethod
    def of(cls, settings: "RayConfig | Mapping[str, Any]", run_id: str) -> Self:
        """As a recipe has it, with the run's namespace. Raises pydantic's ValidationError."""
        config = cls.model_validate(settings)
        return config if config.namespace else config.model_copy(update={"namespace": run_id})

    def arguments(self) -> list[str]:
        """Of the children that join."""
        return ["--address", self.address, "--namespace", self.namespace]


def child_environment(address: str) -> Mapping[str, str]:
    """The environment of a child that is to join the cluster at `address`."""
    settings = {
        # A reference that is pickled outside Ray leaks its object: an error instead.
        "RAY_allow_out_of_band_object_ref_serialization": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if address.startswith(LOOPBACK):  # else Ray dials the host's own address in its place
        settings["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return settings | os.environ


def join(address: str) -> None:
    """Makes this process a driver. Raises ConnectionError, RuntimeError or ValueError."""
    import ray  # noqa: PLC0415, an optional package

    ray.init(
        address=address, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR
    )


def owner_name(node: str) -> str:
    """The name of the actor that owns the payloads of the sidecar at `node`."""
    return f"treadle-payloads-{node}"


def owner_of(node: str, namespace: str) -> Any:
    """A handle of the actor, or None where there is none."""
    import ray  # noqa: PLC0415, an optional package

    untyped: Any = ray
    try:
        return untyped.get_actor(owner_name(node), namespace=namespace)
    except ValueError:
        return None
