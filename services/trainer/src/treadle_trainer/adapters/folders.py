"""Folders that are either whole and durable, or not there."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Generator
from pathlib import Path

from treadle_runtime.files import sync_directory

ASIDE = ".aside-"
"""Prefix of folders that are being written, or that a crash left behind."""


@contextlib.contextmanager
def aside(parent: Path) -> Generator[Path]:
    """An empty folder in `parent` to write into; what is left of it at the end is removed."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f"{ASIDE}{uuid.uuid4().hex}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def install(folder: Path, target: Path) -> None:
    """Makes a folder and all in it durable, then gives it its name, durably.

    `target` must lie beside it. One that exists is replaced; between the two renames there is none.
    """
    sync_tree(folder)
    with aside(target.parent) as old:
        if target.exists():
            target.rename(old / target.name)
        folder.rename(target)
        sync_directory(target.parent)


def sync_tree(folder: Path) -> None:
    """Makes every file and directory below `folder`, and itself, durable."""
    for root, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(Path(root) / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(Path(root))


def remove_leftovers(parent: Path) -> list[str]:
    """Removes what crashed writers left in `parent`; returns the names."""
    left = sorted(path.name for path in parent.glob(f"{ASIDE}*"))
    for name in left:
        shutil.rmtree(parent / name, ignore_errors=True)
    return left
