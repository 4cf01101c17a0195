"""A command line as one process tree: nothing of it outlives the call."""

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle_agents.processes.ended import Ended
from treadle_agents.processes.regardless import regardless
from treadle_agents.processes.streams import Streams
from treadle_core.errors import InvalidFieldError, Kind, TreadleError

MAX_OUTPUT = 1024 * 1024
"""Most bytes of output and errors together, unless told otherwise."""
_REAPER = Path(__file__).with_name("reaper.py")


class TreeLostError(TreadleError):
    """Nobody can say whether something of a command still runs, or something does."""

    kind = Kind.BROKEN
    reason = "TREE_LOST"


async def run_tree(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    deadline_s: float,
    given: bytes = b"",
    max_output: int = MAX_OUTPUT,
) -> Ended:
    """Runs `command` in `folder` until it ends, and kills what it leaves, setsid or not.

    It sees `environment` and no other variable, and reads `given` from its standard input. After
    `deadline_s` seconds, or with its byte number `max_output + 1`, all of it is killed; so it is
    when this call is cancelled, and when this process ends. This holds for code that may be
    trusted not to kill its own watcher; other code belongs into a sandbox.

    Raises InvalidFieldError where the command cannot be started, TreeLostError.
    """
    if not command:
        raise InvalidFieldError("command", limit="a program and its arguments", value="nothing")
    started = time.monotonic()
    streams, theirs = await Streams.open(given, max_output)
    try:
        tree = await _Tree.start(command, environment, folder, theirs)
    except BaseException:
        streams.close()
        raise
    try:
        cut = await streams.watch(tree.told, deadline_s)
        status = await tree.end()
        output, errors = await streams.drained()
    except asyncio.CancelledError:
        await regardless(tree.end())
        raise
    finally:
        streams.close()
    return Ended(status, output, errors, time.monotonic() - started, cut)


class _Tree:
    """A command and its reaper."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self.told = asyncio.create_task(self._listen())
        """What the reaper says at the end, b"" if it was killed itself."""

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        theirs: tuple[int, int, int],
    ) -> "_Tree":
        """Starts both; closes `theirs`."""
        ours, control = socket.socketpair()
        ours.settimeout(0)
        stdin, stdout, stderr = theirs
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_REAPER), str(control.fileno()), *command),
                pass_fds=(control.fileno(),),
                start_new_session=True,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                cwd=folder,
            )
        except BaseException as error:
            ours.close()
            if isinstance(error, (OSError, ValueError)):
                raise InvalidFieldError("command", limit="one that starts", value=error) from error
            raise
        finally:
            control.close()
            for end in theirs:
                os.close(end)
        return cls(process, ours)

    async def end(self) -> int:
        """Kills what is left, and returns the command's status.

        Raises InvalidFieldError where the command never started, TreeLostError.
        """
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        await asyncio.wait([self.told])  # which a cancelled wait does not cancel
        said = self.told.result()
        await self._process.wait()
        self._control.close()
        if not said:
            raise TreeLostError(
                "the watcher of a command was killed; what the command started may still run",
                field="command",
                limit="leaves its watcher alone",
                value=f"exit status {self._process.returncode}",
            )
        told: dict[str, Any] = json.loads(said)
        if "error" in told:
            raise InvalidFieldError("command", limit="one that starts", value=told["error"])
        if told["left"]:
            raise TreeLostError(
                f"processes of a command may not be killed: {told['left']}",
                field="command",
                limit="processes of its own user",
                value=told["left"],
            )
        return told["status"]

    async def _listen(self) -> bytes:
        said = bytearray()
        loop = asyncio.get_running_loop()
        while piece := await loop.sock_recv(self._control, 65536):
            said += piece
        return bytes(said)
