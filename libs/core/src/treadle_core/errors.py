"""The typed errors of the house: raised where they arise, mapped to the wire once.

A reason is a class. `treadle_runtime.errors` turns its `kind` into a gRPC status and its `reason`
into `google.rpc.ErrorInfo`; nothing else in the house knows about either.
"""

from enum import StrEnum


class Kind(StrEnum):
    """What a caller can do about an error; one gRPC status each."""

    INVALID = "invalid"
    """The request is wrong and will stay wrong (INVALID_ARGUMENT)."""
    PRECONDITION = "precondition"
    """Right in itself, refused in the present state (FAILED_PRECONDITION)."""
    NOT_FOUND = "not_found"
    """What the request names does not exist (NOT_FOUND)."""
    CONFLICT = "conflict"
    """The key exists with other content (ALREADY_EXISTS)."""
    EXHAUSTED = "exhausted"
    """A bound is reached; slow down and retry (RESOURCE_EXHAUSTED)."""
    UNAVAILABLE = "unavailable"
    """Nothing is wrong; retry after `retry_after_s` (UNAVAILABLE)."""
    CORRUPT = "corrupt"
    """Bytes differ from their digest (DATA_LOSS)."""
    BROKEN = "broken"
    """A promise of ours is broken; the process should end (INTERNAL)."""


class TreadleError(Exception):
    """Base of every error that may cross a process boundary.

    A subclass names one reason. `field`, `limit` and `value` say what was wrong, as text, and
    `retry_after_s` (seconds) is set where a retry makes sense.
    """

    kind: Kind
    reason: str

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        limit: object = "",
        value: object = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.limit = str(limit)
        self.value = str(value)
        self.retry_after_s = retry_after_s


class InvalidFieldError(TreadleError):
    """A field of a request or record holds a value outside its limits."""

    kind = Kind.INVALID
    reason = "INVALID_FIELD"

    def __init__(self, field: str, *, limit: object, value: object) -> None:
        super().__init__(
            f"{field}: expected {limit}, got {value}", field=field, limit=limit, value=value
        )


class WrongRunError(TreadleError):
    """A request or a stored ledger belongs to another run."""

    kind = Kind.PRECONDITION
    reason = "WRONG_RUN"


class PayloadCorruptError(TreadleError):
    """Bytes do not have the digest or the size that their reference states."""

    kind = Kind.CORRUPT
    reason = "PAYLOAD_CORRUPT"


class PayloadMissingError(TreadleError):
    """No store holds the bytes that a reference names."""

    kind = Kind.NOT_FOUND
    reason = "PAYLOAD_MISSING"
