"""Policy versions: publication numbers and the parameters that they stand for."""

from dataclasses import dataclass
from enum import StrEnum


class VersionState(StrEnum):
    """How far the publication of a version is, as the ledger records it."""

    ANNOUNCED = "announced"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Version:
    """One publication of parameters. Numbers rise over the life of a run and are never reused."""

    number: int
    """From 1."""
    step: int
    """Optimiser steps that made the parameters; 0 is the start."""
    trainer_epoch: int
    """Epoch of the trainer that published it."""
    parent: int
    """Newest version committed before it; 0 for the first."""
    state: VersionState = VersionState.ANNOUNCED
    weights_digest: str = ""
    """Digest of all tensors, known once committed."""
    trace_id: str = ""
    """Trace of the step that the version came from; 32 hex digits."""
