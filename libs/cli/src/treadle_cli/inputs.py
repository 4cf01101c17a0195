"""What a run reads: its policy's folder, tasks and grader, tried before any process starts."""

import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treadle_runtime import plugins
from treadle_runtime.plugins import PluginConfig

_GROUP = "treadle.task_sources"


def check(model: Path, services: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Says what is wrong with the policy's folder, every source and the grader, a line each.

    `services` are their configurations; of one that is not there nothing is said.
    """
    experience = services["experience"]
    sources = {"experience.source": experience["source"]}
    evaluation: Any = experience.get("evaluation") or {"sets": []}
    for chosen in evaluation["sets"]:
        sources[f"experience.evaluation.sets.{chosen['name']}.source"] = chosen["source"]
    found = list(_policy(model))
    for key, source in sources.items():
        found += _source(key, source)
    return found or _grader(model, services)


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


def _grader(model: Path, services: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Has the agent `grader` grade an answer of nothing to the first task."""
    agent: Any = services.get("rollout", {}).get("agent")
    if not agent or agent["name"] != "grader":
        return []
    source = PluginConfig.model_validate(services["experience"]["source"])
    key = "rollout.agent"
    try:
        made = plugins.build("treadle.agents", PluginConfig.model_validate(agent), model=model)
        key += ", asked the first task and told nothing"
        made.check(plugins.build(_GROUP, source).read(0))
    except Exception as error:  # noqa: BLE001, a grader is anybody's code, and is told about
        told = getattr(error, "message", None) or _described(error)
        return [told if told.startswith("run.model") else f"{key}: {told}"]
    return []


def _described(error: Exception) -> str:
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"
