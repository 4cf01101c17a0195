"""Folders that are either whole and durable, or not there."""

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Generator, Iterable
from pathlib import Path

from treadle_runtime.failpoints import failpoint
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


def install_as_new(folder: Path, targets: Iterable[Path]) -> Path:
    """Like `install`, under the first of `targets` that nobody has; nothing is ever replaced."""
    sync_tree(folder)
    failpoint("trainer.folder.before_rename")
    for target in targets:
        try:
            # A folder with content is not replaced: between a look and this call it may have come.
            folder.rename(target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        else:
            failpoint("trainer.folder.after_rename")
            sync_directory(target.parent)
            return target
    raise AssertionError


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


def leftovers(parent: Path) -> list[str]:
    """Names of what writers have aside in `parent`: those that crashed, and those at work."""
    return sorted(path.name for path in parent.glob(f"{ASIDE}*"))
