"""Sandboxes: where code runs that nobody vouches for. Plugins of `treadle.sandboxes`."""

from treadle_agents.sandbox.ports import (
    Box,
    BoxLostError,
    Limits,
    Sandbox,
    SandboxMissingError,
    run_once,
)

__all__ = ["Box", "BoxLostError", "Limits", "Sandbox", "SandboxMissingError", "run_once"]
