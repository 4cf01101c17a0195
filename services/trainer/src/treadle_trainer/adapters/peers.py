"""How the trainer calls its peers, and how long it waits for them."""

from typing import Any

from treadle_runtime.channel import call

TIMEOUT_S = 15.0
"""Of one try, beyond what the peer may wait."""
AWAY_S = 60.0
"""How long a peer may be away before a call fails. One that has no room is waited for."""


async def ask(method: Any, request: Any, *, wait_s: float = 0.0) -> Any:
    """The answer of a peer that may wait up to `wait_s` with it. Raises RemoteError."""
    timeout_s = TIMEOUT_S + wait_s
    return await call(method, request, timeout_s=timeout_s, budget_s=AWAY_S, patient=True)
