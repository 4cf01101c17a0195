"""Why the rollout service refuses or fails; one class a reason."""

from treadle_core.errors import Kind, TreadleError


class ContextOverflowError(TreadleError):
    """A prompt leaves no room in the engine's context for one sampled token."""

    kind = Kind.INVALID
    reason = "CONTEXT_OVERFLOW"

    def __init__(self, *, prompt_tokens: int, max_context: int) -> None:
        super().__init__(
            f"a prompt of {prompt_tokens} tokens leaves no room in a context of {max_context}",
            field="token_ids",
            limit=max_context - 1,
            value=prompt_tokens,
        )


class UnsupportedImageError(TreadleError):
    """A prompt shows images to an engine that reads none."""

    kind = Kind.INVALID
    reason = "UNSUPPORTED_IMAGE"

    def __init__(self, images: int) -> None:
        super().__init__(
            f"media: the engine reads no images, got {images}", field="media", limit=0, value=images
        )


class NonFiniteLogprobError(TreadleError):
    """The policy gave a sampled token no finite log-probability; the turn is lost."""

    kind = Kind.PRECONDITION
    reason = "NON_FINITE_LOGPROB"

    def __init__(self, *, version: int, position: int, value: float) -> None:
        super().__init__(
            f"version {version} gave the token at position {position} log-probability {value}",
            field="logprobs",
            limit="finite",
            value=value,
        )


class EngineFaultError(TreadleError):
    """The engine lost one call and is as good as before."""

    kind = Kind.UNAVAILABLE
    reason = "ENGINE_FAULT"

    def __init__(self, call: int) -> None:
        super().__init__(f"call {call} was to fail", field="call", value=call)


class ScriptError(TreadleError):
    """The script of a scripted policy did not answer."""

    kind = Kind.INVALID
    reason = "SCRIPT_FAILED"

    def __init__(self, why: str) -> None:
        super().__init__(f"script: {why}", field="script", value=why)


class SessionEndedError(TreadleError):
    """A session was ended before, with another outcome."""

    kind = Kind.CONFLICT
    reason = "SESSION_ENDED"

    def __init__(self, session: str) -> None:
        super().__init__(
            f"session {session} was ended with another outcome", field="session", value=session
        )


class NoEpisodeError(TreadleError):
    """No episode is offered now."""

    kind = Kind.UNAVAILABLE
    reason = "NO_EPISODE"

    def __init__(self) -> None:
        super().__init__("no episode waits for a client; ask again", retry_after_s=1.0)


class NoGatewayError(TreadleError):
    """This replica plays its episodes itself."""

    kind = Kind.PRECONDITION
    reason = "NO_GATEWAY"

    def __init__(self) -> None:
        super().__init__(
            "rollout.agent: expected external, for clients to take episodes", field="rollout.agent"
        )


class EngineClosedError(TreadleError):
    """The engine was closed before the call was done."""

    kind = Kind.UNAVAILABLE
    reason = "ENGINE_CLOSED"

    def __init__(self) -> None:
        super().__init__("the engine is closed")


class EngineBrokenError(TreadleError):
    """The engine's decoding ended by an unexpected error; the process should end."""

    kind = Kind.BROKEN
    reason = "ENGINE_BROKEN"

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"decoding ended: {type(cause).__name__}: {cause}")


class UnsupportedModelError(TreadleError):
    """A model cannot be served by this engine."""

    kind = Kind.INVALID
    reason = "UNSUPPORTED_MODEL"

    def __init__(self, model: str, why: str) -> None:
        super().__init__(f"{model}: {why}", field="model", limit="a servable model", value=model)
