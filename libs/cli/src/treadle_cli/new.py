"""`treadle new DIR`: writes a small project of your own that runs as it is."""

import argparse
import sys
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from treadle_runtime.config import BAD_CONFIGURATION


def main(argv: list[str]) -> int:
    """Writes recipe, agent, grader, tasks, demonstrations and a test; overwrites nothing."""
    parser = argparse.ArgumentParser(prog="treadle new", description=main.__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    directory: Path = parser.parse_args(argv).directory
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            there = "it is a file" if directory.is_file() else "it is not empty"
            sys.stderr.write(
                f"{directory}: nothing was written, since {there}; name a new folder\n"
            )
            return BAD_CONFIGURATION
        write(files("treadle_cli") / "templates" / "project", directory)
    except OSError as error:
        sys.stderr.write(f"{directory}: nothing can be written here: {error.strerror}\n")
        return BAD_CONFIGURATION
    print(f"{directory} is yours. Next:\n")
    print(f"    cd {directory}")
    print("    treadle sft warmup.yaml      # makes a small policy")
    print("    treadle train recipe.yaml    # trains it in your environment")
    print("\nREADME.md says what to edit.")
    return 0


def write(template: Traversable, directory: Path) -> None:
    """Copies the files of `template`; none is there yet."""
    directory.mkdir(parents=True, exist_ok=True)
    for entry in template.iterdir():
        if entry.name == "__pycache__":
            continue
        if entry.is_dir():
            write(entry, directory / entry.name)
        else:
            (directory / entry.name).write_bytes(entry.read_bytes())
