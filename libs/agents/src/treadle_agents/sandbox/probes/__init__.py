"""Probes: real attempts to get out of a sandbox, and what the host sees of them."""

from treadle_agents.sandbox.probes.probe import PROBES, Finding, findings

__all__ = ["PROBES", "Finding", "findings"]
