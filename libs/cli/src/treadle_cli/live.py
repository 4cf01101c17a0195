"""Draws a run's screen on a terminal while the run goes on, and keeps all else off it."""

import logging
import os
import sys
import time
from collections import deque
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live

from treadle_cli import preflight, screen
from treadle_cli.compose import Plan
from treadle_cli.rows import RunTail
from treadle_cli.standing import Standing

_KEPT_LINES = 50


def can_draw(stream: TextIO) -> bool:
    """Whether the stream is a terminal that a screen can be drawn on."""
    utf8 = stream.encoding.lower().replace("-", "") == "utf8"
    return stream.isatty() and utf8 and os.environ.get("TERM", "dumb") not in ("", "dumb")


class Screen:
    """Follows the metrics of a run's services on one screen.

    Within its block what is logged is shown there, and told again on stderr after it.
    """

    def __init__(self, plan: Plan, console: Console | None = None) -> None:
        """Draws on stdout, unless a console is given."""
        self._plan = plan
        self._tail = RunTail(plan.directory)
        self.standing = Standing(plan.steps)
        self._log = _LogLines()
        self._handlers: list[logging.Handler] = []
        self._console = console or Console()
        self._live = Live(console=self._console, screen=True, auto_refresh=False)

    def __enter__(self) -> Self:
        root = logging.getLogger()
        self._handlers, root.handlers = root.handlers, [self._log]
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the last state on the terminal."""
        self._live.stop()
        logging.getLogger().handlers = self._handlers
        self._console.print(self._frame())
        sys.stderr.write("".join(f"treadle: {line}\n" for line in self._log.lines))

    def report(self) -> None:
        """Draws the screen anew."""
        for writer, row in self._tail.rows():
            self.standing.fold(writer, row)
        self._live.update(self._frame(), refresh=True)

    def _frame(self) -> screen.RenderableType:
        plan = self._plan
        beside = screen.Beside(
            plan.run_id,
            str(plan.directory),
            self.standing.phase,
            preflight.room(plan.directory, plan.start),
            self._log.lines[-1] if self._log.lines else "",
        )
        return screen.render(self.standing, beside, time.time())


class _LogLines(logging.Handler):
    """Keeps the newest lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
