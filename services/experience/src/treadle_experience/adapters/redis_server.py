"""One Redis server as a ledger sees it: scripts, bounded waits, typed errors, its settings.

Needs `redis` (`pip install "treadle-experience[redis]"`).
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import (
    ConnectionError as AwayError,
)
from redis.exceptions import (
    TimeoutError as SilentError,
)
from redis.retry import Retry

from treadle_core.errors import InvalidFieldError
from treadle_experience.core.errors import LedgerAwayError, LedgerFailedError, LedgerFullError
from treadle_experience.ports import Durability

log = logging.getLogger(__name__)

T = TypeVar("T")

_AWAY = (AwayError, SilentError, BusyLoadingError, ReadOnlyError)
"""What a server says, or does not, that restarts, loads, fails over or is out of reach."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0


class OneWrite:
    """Packs a command into one buffer, which the client sends with one call.

    Its own packer makes a buffer of each payload of an append, and other threads may take the
    interpreter between two of them.
    """

    def pack(self, *args: str | bytes | int) -> list[bytes]:
        """The command as it goes over the wire; its name may have several words."""
        name, *rest = args
        values = [*(name if isinstance(name, bytes) else str(name).encode()).split(), *rest]
        parts = [b"*%d\r\n" % len(values)]
        for value in values:
            data = value if isinstance(value, bytes) else str(value).encode()
            parts += (b"$%d\r\n" % len(data), data, b"\r\n")
        return [b"".join(parts)]


class RedisServer:
    """Blocks at most `patience_s` and one `timeout_s`, and raises LedgerAwayError then."""

    def __init__(
        self, url: str, durability: Durability, timeout_s: float, patience_s: float
    ) -> None:
        """Connects on the first call. Raises InvalidFieldError for what is no URL of Redis."""
        try:
            self._client = redis.Redis.from_url(  # pyright: ignore[reportUnknownMemberType]
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
                redis_connect_func=self._greet,
                command_packer=OneWrite(),
            )
        except ValueError as error:
            raise InvalidFieldError("ledger.url", limit="a URL of Redis", value=error) from error
        self._durability = durability
        self._patience_s = patience_s
        self._scripts: dict[str, Any] = {}

    def run(
        self,
        script: str,
        keys: Sequence[str],
        arguments: Sequence[Any],
        patience_s: float | None = None,
    ) -> list[str]:
        """What the script answers; tried as long as `ask` does, unless told otherwise."""
        chosen = self._scripts.get(script)
        if chosen is None:
            chosen = self._scripts[script] = self._client.register_script(script)
        answer: list[bytes] = self.ask(lambda _: chosen(keys=keys, args=arguments), patience_s)
        return [each.decode() for each in answer]

    def ask(self, work: Callable[[redis.Redis], T], patience_s: float | None = None) -> T:
        """Tries `work`, which may be done more than once, until it is answered.

        Raises LedgerAwayError when nobody answers in time, LedgerFullError, LedgerFailedError for
        any other refusal, and InvalidFieldError where the server is not set up for what the
        ledger declares.
        """
        patience_s = self._patience_s if patience_s is None else patience_s
        until, pause_s = time.monotonic() + patience_s, _FIRST_PAUSE_S
        while True:
            try:
                return work(self._client)
            except _AWAY as error:
                if time.monotonic() + pause_s > until:
                    raise LedgerAwayError(
                        f"the server of the ledger does not answer: {error}",
                        field="ledger.url",
                        limit=f"an answer within {patience_s:g} s",
                        value=repr(error),
                    ) from error
                log.debug("asking again: %s", error)
            except RedisError as error:
                raise _refusal(error) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def close(self) -> None:
        """Ends all connections."""
        self._client.close()

    def _greet(self, connection: Any) -> None:
        """Begins each connection: a server may have come back as another, or set up otherwise."""
        connection.on_connect()
        try:
            self._check(connection)
        except InvalidFieldError:
            connection.disconnect()
            raise

    def _check(self, connection: Any) -> None:
        """Raises InvalidFieldError naming the first setting of the server that must be another."""
        demanded = {"maxmemory-policy": "noeviction"}
        if self._durability is not Durability.PROCESS:
            demanded |= {"appendonly": "yes", "appendfsync": "always"}
        for key, value in demanded.items():
            connection.send_command("CONFIG", "GET", key)
            try:
                _, found = connection.read_response()
            except (ResponseError, ValueError) as error:
                raise InvalidFieldError(
                    "ledger.url", limit=f"a server that tells {key} (CONFIG GET)", value=error
                ) from error
            if found.decode() != value:
                raise InvalidFieldError(
                    f"ledger.durability {self._durability}",
                    limit=f"{key} {value} on the server",
                    value=f"{key} {found.decode()}",
                )


def _refusal(error: RedisError) -> Exception:
    if isinstance(error, OutOfMemoryError) or str(error).startswith("MISCONF"):
        return LedgerFullError(
            f"the server of the ledger: {error}", field="ledger", limit="room", value="none"
        )
    return LedgerFailedError(f"the server of the ledger: {error!r}", field="ledger", value=error)
