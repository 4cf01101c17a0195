"""TaskSource `hugging_face`: a data set on disk, as Hugging Face's `datasets` leaves it.

A folder of `save_to_disk`, a Parquet or Arrow file, or a folder of such. Needs `pyarrow`
(`pip install "treadle-experience[arrow]"`).
"""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from treadle_core.errors import InvalidFieldError
from treadle_experience.adapters.rows import Order, require
from treadle_experience.ports import TaskSpec


class HuggingFaceTasks:
    """TaskSource plugin `hugging_face`. Arrow files are mapped, Parquet files are read whole."""

    def __init__(
        self,
        path: str,
        split: str | None = None,
        columns: dict[str, str] | None = None,
        epochs: int | None = 1,
        shuffle: int | None = None,
    ) -> None:
        """Takes `columns` (field of the task: column), all of them as they are when absent.

        `split` picks one of a folder of several. `epochs` and `shuffle` are as those of `jsonl`.
        Raises InvalidFieldError naming the columns or splits that are there.
        """
        if not Path(path).exists():
            here = f"{path}, looked for from {Path.cwd()}"
            raise InvalidFieldError("source.path", limit="a data set on disk", value=here)
        table = _table(_files(_folder(Path(path), split)))
        self._columns = columns or {name: name for name in table.column_names}
        require(self._columns.values(), table.column_names, path)
        self._table = table.select(list(dict.fromkeys(self._columns.values())))
        self._order = Order(table.num_rows, epochs=epochs, shuffle=shuffle)

    def read(self, cursor: int) -> TaskSpec | None:
        row = self._order.row(cursor)
        if row is None:
            return None
        values: Mapping[str, Any] = self._table.slice(row, 1).to_pylist()[0]
        return {field: values[column] for field, column in self._columns.items()}


def _folder(path: Path, split: str | None) -> Path:
    """The folder of the split that was asked for."""
    index = path / "dataset_dict.json"
    if not index.is_file():
        if split is not None and path.is_dir() and (path / split).is_dir():
            return path / split
        if split is not None:
            raise InvalidFieldError(
                "source.split", limit=f"nothing, as {path} has none", value=split
            )
        return path
    splits: list[str] = json.loads(index.read_text(encoding="utf-8"))["splits"]
    if split not in splits:
        raise InvalidFieldError("source.split", limit=f"one of {', '.join(splits)}", value=split)
    return path / split


def _files(path: Path) -> list[Path]:
    """Files of the data set in order: those that its `state.json` names, or all there are."""
    if path.is_file():
        return [path]
    state = path / "state.json"
    if state.is_file():
        named: Any = json.loads(state.read_text(encoding="utf-8"))["_data_files"]
        return [path / each["filename"] for each in named]
    found = sorted([*path.glob("*.parquet"), *path.glob("*.arrow")])
    if not found:
        there = ", ".join(sorted(each.name for each in path.iterdir())[:10]) or "nothing"
        limit = f"state.json, *.arrow or *.parquet in {path}"
        raise InvalidFieldError("source.path", limit=limit, value=there)
    return found


def _table(files: list[Path]) -> Any:
    """All rows as one table. pyarrow is imported here, as only this source needs it."""
    try:
        arrow: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise InvalidFieldError(
            "source.name",
            limit='pyarrow for hugging_face (pip install "treadle-experience[arrow]")',
            value=error,
        ) from error
    tables: list[Any] = []
    for file in files:
        try:
            whole = file.suffix == ".parquet"
            tables.append(parquet.read_table(file) if whole else _mapped(arrow, file))
        except (OSError, ValueError) as error:
            raise InvalidFieldError(str(file), limit="Arrow or Parquet", value=error) from error
    return arrow.concat_tables(tables)


def _mapped(arrow: Any, file: Path) -> Any:
    """`datasets` writes streams; others write files."""
    source = arrow.memory_map(str(file))
    try:
        return arrow.ipc.open_stream(source).read_all()
    except arrow.ArrowInvalid:
        source.seek(0)
        return arrow.ipc.open_file(source).read_all()
