"""Faults: what makes an episode of a claim unfit to train on."""

from dataclasses import dataclass
from enum import StrEnum


class FaultReason(StrEnum):
    """Why an episode of a claim cannot be trained on."""

    PAYLOAD_LOST = "payload_lost"
    """Its bytes cannot be had, or are not what their sha256 says."""
    QUARANTINED = "quarantined"
    """Its bytes are there and unfit."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one episode of a claim."""

    episode_id: str
    attempt: int
    reason: FaultReason
    message: str
    """For people."""
