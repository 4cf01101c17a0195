"""Becomes a recorded local server: `python -m treadle_runtime.local_servers.launch NAME RUN`.

The process takes the server's lock, so that two never work on the same data, and then is the
server: it has its id, gets its signals, and holds the lock and the pipes of those who drain later
for as long as it lives. Beside it a guard watches the pipe that says when nobody needs the server
any more, and tells it to end.
"""

import os
import select
import signal
import sys
import time
from pathlib import Path

from treadle_runtime.drain_order import SUPERVISOR_FD
from treadle_runtime.files import open_lock, try_lock
from treadle_runtime.local_servers.known import KINDS

_LOCK_S = 30.0
_LOOK_S = 0.05
_GRACE_S = 10.0
"""Seconds for a clean end."""


def main(argv: list[str]) -> None:
    """Never returns; exits with 1 and a reason where the server cannot be started."""
    name, run_dir = argv
    server = KINDS[name].recorded(Path(run_dir))
    if server is None:
        sys.exit(f"{run_dir}: no {name} is recorded there")
    binary = server.binary()
    if binary is None:
        sys.exit(f"{name}: not installed; {server.advice}")
    lock = open_lock(server.directory / "lock")
    give_up = time.monotonic() + _LOCK_S
    while not try_lock(lock):
        if time.monotonic() > give_up:
            sys.exit(
                f"{name}: another process has worked on {server.directory} for {_LOCK_S:.0f} s"
            )
        time.sleep(_LOOK_S)
    server.prepare()
    _leave_guard(lock)
    os.set_inheritable(lock, True)  # noqa: FBT003, the function's own form
    os.chdir(server.directory)
    os.execve(  # noqa: S606, what this module is for
        binary, [binary, *server.arguments()], os.environ | server.environment()
    )


def _leave_guard(lock: int) -> None:
    """Forks who ends this process, whatever that has become, when nobody needs it any more."""
    watched = int(os.environ.get(SUPERVISOR_FD, "-1"))
    if watched < 0:
        return
    guarded = os.pidfd_open(os.getpid())
    if os.fork():
        os.close(guarded)
        return
    os.close(lock)
    try:
        _guard(guarded, watched)
    finally:
        os._exit(0)


def _guard(guarded: int, watched: int) -> None:
    waiting = select.poll()
    waiting.register(guarded, select.POLLIN)
    waiting.register(watched, select.POLLIN)
    if guarded in dict(waiting.poll()):
        return
    waiting.unregister(watched)
    signal.pidfd_send_signal(guarded, signal.SIGTERM)
    if not waiting.poll(_GRACE_S * 1e3):
        signal.pidfd_send_signal(guarded, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
