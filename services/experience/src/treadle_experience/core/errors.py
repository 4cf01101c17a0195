"""One class per reason that the ledger can refuse something for; the proto says when."""

from treadle_core.errors import Kind, TreadleError


class WriterFencedError(TreadleError):
    """Another experience process took the ledger over; this one must end."""

    kind = Kind.PRECONDITION
    reason = "WRITER_FENCED"


class UnknownVersionError(TreadleError):
    """A version that a replica serves or a token names is not committed in this run."""

    kind = Kind.PRECONDITION
    reason = "UNKNOWN_VERSION"


class VersionNotFoundError(TreadleError):
    """The version that a request is about was never announced."""

    kind = Kind.NOT_FOUND
    reason = "UNKNOWN_VERSION"


class VersionEndedError(TreadleError):
    """The version is committed, aborted or overtaken; nothing can happen to it any more."""

    kind = Kind.PRECONDITION
    reason = "VERSION_ENDED"


class StaleAttemptError(TreadleError):
    """The attempt is no longer the one that counts; its result is to be dropped."""

    kind = Kind.PRECONDITION
    reason = "STALE_ATTEMPT"


class ResultConflictError(TreadleError):
    """The attempt is recorded with another payload; the first one wins."""

    kind = Kind.CONFLICT
    reason = "RESULT_CONFLICT"


class UnknownEpisodeError(TreadleError):
    """No ticket with this episode and attempt was issued, or its task is settled and forgotten."""

    kind = Kind.NOT_FOUND
    reason = "UNKNOWN_EPISODE"


class CheckpointRequiredError(TreadleError):
    """The run has checkpoints; a trainer has to restore one of them."""

    kind = Kind.PRECONDITION
    reason = "CHECKPOINT_REQUIRED"


class UnknownCheckpointError(TreadleError):
    """No checkpoint with this digest can be restored in this run."""

    kind = Kind.NOT_FOUND
    reason = "UNKNOWN_CHECKPOINT"


class TrainerFencedError(TreadleError):
    """A newer trainer acquired the run; `limit` is its epoch."""

    kind = Kind.PRECONDITION
    reason = "TRAINER_FENCED"


class StepOutOfOrderError(TreadleError):
    """The step is not the one that the lineage has reached."""

    kind = Kind.PRECONDITION
    reason = "STEP_OUT_OF_ORDER"


class WrongParentError(TreadleError):
    """The checkpoint does not follow the head of the lineage."""

    kind = Kind.PRECONDITION
    reason = "WRONG_PARENT"


class LagBrokenError(TreadleError):
    """A batch would hold a token beyond the lag bound, which admission excludes."""

    kind = Kind.BROKEN
    reason = "LAG_BOUND_BROKEN"


class TaskSourceError(TreadleError):
    """A task source raised, or returned something that is not a task."""

    kind = Kind.BROKEN
    reason = "TASK_SOURCE_FAILED"


class FilterError(TreadleError):
    """A filter raised, or returned something that is not a reason."""

    kind = Kind.BROKEN
    reason = "FILTER_FAILED"


class LedgerFailedError(TreadleError):
    """The ledger could not store a decision; nothing is acknowledged from here on."""

    kind = Kind.BROKEN
    reason = "LEDGER_FAILED"


class LedgerFullError(TreadleError):
    """The ledger's disk has no room. Nothing is acknowledged until it has; no decision is lost."""

    kind = Kind.EXHAUSTED
    reason = "LEDGER_FULL"


class LedgerAwayError(TreadleError):
    """The server of the ledger does not answer; what was asked may be done or not."""

    kind = Kind.UNAVAILABLE
    reason = "LEDGER_AWAY"


class LedgerHeldError(TreadleError):
    """Another process of this run is alive and writes; one that stands by waits for its end."""

    kind = Kind.UNAVAILABLE
    reason = "LEDGER_HELD"


class LedgerLostError(TreadleError):
    """What is stored is not this run's, or less than was acknowledged: nothing may follow it."""

    kind = Kind.PRECONDITION
    reason = "LEDGER_LOST"


class LedgerFormatError(TreadleError):
    """The stored ledger is of another format, or is damaged."""

    kind = Kind.BROKEN
    reason = "LEDGER_FORMAT"
