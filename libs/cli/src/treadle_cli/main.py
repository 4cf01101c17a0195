"""The `treadle` command: finds its subcommands by entry point and hands over."""

import os
import sys
from importlib.metadata import entry_points
from io import TextIOWrapper

from treadle_runtime.config import BAD_CONFIGURATION
from treadle_runtime.spelling import did_you_mean


def main(argv: list[str] | None = None) -> None:
    """Runs `treadle COMMAND ...`; each command is an entry point of `treadle.commands`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a letter that it lacks ends no run
    words = sys.argv[1:] if argv is None else argv
    commands = {point.name: point for point in entry_points(group="treadle.commands")}
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: treadle {{{','.join(sorted(commands))}}} ...")
        raise SystemExit(0 if words else BAD_CONFIGURATION)
    if words[0] not in commands:
        hint = did_you_mean(words[0], list(commands))
        sys.stderr.write(f"treadle: no command {words[0]!r}{hint}\n")
        raise SystemExit(BAD_CONFIGURATION)
    command = commands[words[0]].load()
    try:
        status = command(words[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads, as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    raise SystemExit(status)


if __name__ == "__main__":
    main()
