"""What refit, or the ledger behind it, refuses; one class per reason."""

from treadle_core.errors import Kind, TreadleError


class VersionEndedError(TreadleError):
    """The version is aborted, replaced, or older than one that is committed."""

    kind = Kind.PRECONDITION
    reason = "VERSION_ENDED"


class TrainerFencedError(TreadleError):
    """A newer trainer acquired the run."""

    kind = Kind.PRECONDITION
    reason = "TRAINER_FENCED"


class VersionNotFoundError(TreadleError):
    """The version was never announced."""

    kind = Kind.NOT_FOUND
    reason = "UNKNOWN_VERSION"
