"""What a run reads: the folder of its policy and its tasks, looked at before any process starts."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treadle_runtime import plugins
from treadle_runtime.plugins import PluginConfig

_GROUP = "treadle.task_sources"


def check(model: Path, experience: Mapping[str, Any]) -> list[str]:
    """Says what is wrong with the policy's folder and with every source, a line each.

    `experience` is the configuration of that service.
    """
    sources = {"experience.source": experience["source"]}
    evaluation: Any = experience.get("evaluation") or {"sets": []}
    for chosen in evaluation["sets"]:
        sources[f"experience.evaluation.sets.{chosen['name']}.source"] = chosen["source"]
    found = list(_policy(model))
    for key, source in sources.items():
        found += _source(key, source)
    return found


def _policy(model: Path) -> Iterator[str]:
    save = "of transformers writes it"
    if not (model / "tokenizer.json").is_file():
        yield f"run.model: {model} has no tokenizer.json; `tokenizer.save_pretrained` {save}"
    if not any(model.glob("*.safetensors")):
        yield f"run.model: {model} has no *.safetensors; `model.save_pretrained` {save}"


def _source(key: str, source: Any) -> list[str]:
    """Builds a source, as the ledger will, and reads its first task."""
    try:
        if plugins.build(_GROUP, PluginConfig.model_validate(source)).read(0) is None:
            return [f"{key}: expected at least one task, got none"]
    except Exception as error:  # noqa: BLE001, a source is anybody's code, and is told about
        text = str(error) or type(error).__name__
        inner = text.startswith("source.")  # names a parameter, where others name a file and line
        return [key.removesuffix("source") + text if inner else f"{key}: {text}"]
    return []
