"""WeightTransport `files`: versions as safetensors files, in a directory or under a URL.

A directory is mapped, locked and fsynced; what a URL's store keeps of that is its own.
"""

from pathlib import Path
from typing import Any

from treadle_core.errors import InvalidFieldError
from treadle_weights.files import Files
from treadle_weights.transport import Arena, Stored, WeightReceiver, WeightSender, WeightTransport
from treadle_weights.url_files import UrlFiles, folder_of


class FileTransport:
    """WeightTransport plugin `files`."""

    def __init__(
        self,
        directory: Path | None = None,
        url: str = "",
        options: dict[str, Any] | None = None,
        *,
        run_dir: Path | None = None,
    ) -> None:
        """A `directory` that exists, or a `url` that fsspec opens with its `options`.

        With neither it is `versions` in the run's directory, and is made. Raises InvalidFieldError.
        """
        if directory is not None and url:
            raise InvalidFieldError("url", limit="none beside a directory", value=url)
        self._files: WeightTransport = (
            UrlFiles(folder_of(url, options or {})) if url else Files(directory, run_dir=run_dir)
        )

    def arena(self, run_id: str, version: int, size: int) -> Arena:
        return self._files.arena(run_id, version, size)

    def alias(self, run_id: str, version: int, base: Arena) -> Arena:
        return self._files.alias(run_id, version, base)

    def find(self, run_id: str, version: int) -> Stored | None:
        return self._files.find(run_id, version)

    def sender(self, run_id: str) -> WeightSender:
        return self._files.sender(run_id)

    def receiver(self) -> WeightReceiver:
        return self._files.receiver()
