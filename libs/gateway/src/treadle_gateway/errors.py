"""What a client is told when it cannot be answered."""

from typing import Literal, TypeAlias

RefusalKind: TypeAlias = Literal[
    "invalid",  # 400
    "unauthenticated",  # 401
    "unknown_model",  # 404
    "unknown_path",  # 404
    "wrong_method",  # 405
    "slow",  # 408
    "ended",  # 410
    "too_large",  # 413
    "wrong_type",  # 415
    "upgrade",  # 426
    "busy",  # 429
    "header_too_large",  # 431
    "overflow",  # 400: the prompt leaves no room
    "internal",  # 500
    "unavailable",  # 503
]


RETRY_S = 1.0
"""Seconds after which a client may come again, where nobody knows better."""


class RefusedError(Exception):
    """A request that is not answered with a reply; each wire writes it in its own shape."""

    def __init__(
        self,
        kind: RefusalKind,
        message: str,
        *,
        field: str = "",
        code: str = "",
        retry_after_s: float = 0.0,
        tokens: int = 0,
        limit: int = 0,
    ) -> None:
        """`field` names what is wrong, `code` is for programs; an overflow states both counts.

        `tokens` are those of the prompt, `limit` is the most of prompt and reply together.
        """
        super().__init__(message)
        self.kind: RefusalKind = kind
        self.message = message
        self.field = field
        self.code = code
        self.retry_after_s = retry_after_s
        self.tokens = tokens
        self.limit = limit
