"""Errors in the shapes and words of the wires."""

import math
from collections.abc import Mapping

from treadle_core.tickets import Json
from treadle_gateway.errors import RefusalKind, RefusedError

STATUS: Mapping[RefusalKind, int] = {
    "invalid": 400,
    "overflow": 400,
    "unauthenticated": 401,
    "unknown_model": 404,
    "unknown_path": 404,
    "wrong_method": 405,
    "slow": 408,
    "ended": 410,
    "too_large": 413,
    "wrong_type": 415,
    "upgrade": 426,
    "busy": 429,
    "header_too_large": 431,
    "internal": 500,
    "unavailable": 503,
}

_OPENAI_CODES: Mapping[RefusalKind, str] = {
    "overflow": "context_length_exceeded",
    "unauthenticated": "invalid_api_key",
    "unknown_model": "model_not_found",
    "ended": "session_ended",
    "busy": "rate_limit_exceeded",
    "internal": "server_error",
    "unavailable": "server_error",
}
_OPENAI_TYPES: Mapping[RefusalKind, str] = {
    "unauthenticated": "authentication_error",
    "busy": "rate_limit_error",
    "internal": "server_error",
    "unavailable": "server_error",
}
_ANTHROPIC_TYPES: Mapping[RefusalKind, str] = {
    "unauthenticated": "authentication_error",
    "unknown_model": "not_found_error",
    "unknown_path": "not_found_error",
    "ended": "permission_error",
    "too_large": "request_too_large",
    "busy": "rate_limit_error",
    "internal": "api_error",
    "unavailable": "api_error",
}
_INVALID = "invalid_request_error"


def headers_of(error: RefusedError) -> dict[str, str]:
    """When to come again, in whole seconds and, for the SDKs, in milliseconds."""
    if error.retry_after_s <= 0:
        return {}
    return {
        "Retry-After": str(math.ceil(error.retry_after_s)),
        "retry-after-ms": str(math.ceil(error.retry_after_s * 1000)),
    }


def openai_code(error: RefusedError) -> str | None:
    """For programs; None where there is none."""
    return error.code or _OPENAI_CODES.get(error.kind)


def openai_words(error: RefusedError) -> str:
    """The message; an overflow is said as clients know it."""
    if error.kind != "overflow":
        return error.message
    return (
        f"This model's maximum context length is {error.limit} tokens. However, your messages "
        f"resulted in {error.tokens} tokens. Please reduce the length of the messages."
    )


def openai_error(error: RefusedError) -> dict[str, Json]:
    """Body of an error on Chat Completions, Responses and Completions."""
    return {
        "error": {
            "message": openai_words(error),
            "type": _OPENAI_TYPES.get(error.kind, _INVALID),
            "param": error.field or None,
            "code": openai_code(error),
        }
    }


def openai_refusal(error: RefusedError) -> tuple[int, dict[str, str], dict[str, Json]]:
    """Status, headers and body."""
    return STATUS[error.kind], headers_of(error), openai_error(error)


def anthropic_error(error: RefusedError) -> dict[str, Json]:
    """Body of an error on Messages."""
    message = error.message
    if error.kind == "overflow":
        # One token of the reply has to fit in; clients read both numbers.
        message = f"prompt is too long: {error.tokens} tokens > {error.limit - 1} maximum"
    said: dict[str, Json] = {
        "type": _ANTHROPIC_TYPES.get(error.kind, _INVALID),
        "message": message,
    }
    if error.code:
        said["details"] = {"error_code": error.code}
    return {"type": "error", "error": said}


def anthropic_refusal(error: RefusedError) -> tuple[int, dict[str, str], dict[str, Json]]:
    """Status, headers and body."""
    return STATUS[error.kind], headers_of(error), anthropic_error(error)
