import sys
from pathlib import Path
from typing import Any

import pytest

from treadle_agents import ChatAgent, Env
from treadle_agents.adapters.gymnasium import GymnasiumEnv
from treadle_agents.adapters.mcp import McpAgent, Server
from treadle_agents.adapters.reasoning_gym import ReasoningGymEnv
from treadle_agents.adapters.textarena import TextArenaGame
from treadle_agents.adapters.verifiers import VerifiersAgent
from treadle_core.errors import InvalidFieldError
from treadle_runtime import plugins
from treadle_runtime.plugins import PluginConfig


@pytest.mark.parametrize(
    ("adapter", "told", "modules", "extra"),
    [
        (GymnasiumEnv, {"model": Path(), "environment": "A-v0"}, ["gymnasium"], "gymnasium"),
        (ReasoningGymEnv, {"model": Path()}, ["reasoning_gym"], "reasoning-gym"),
        (TextArenaGame, {"game": "TicTacToe-v0"}, ["textarena"], "textarena"),
        (McpAgent, {"servers": {"a": Server(url="http://a")}}, ["mcp"], "mcp"),
        (
            VerifiersAgent,
            {"environment": {}},
            ["verifiers", "verifiers.v1.utils.loaders"],
            "verifiers",
        ),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
    adapter: type[Env | ChatAgent],
    told: dict[str, object],
    modules: list[str],
    extra: str,
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidFieldError, match=rf'pip install "treadle-agents\[{extra}\]"'):
        adapter(**told)


def built(name: str, **told: Any) -> Any:
    """As a recipe names it, and gives its parameters as JSON."""
    module = name.partition(":")[0]
    library = {"mcp": "mcp", "seeds": "treadle_agents"}.get(module, module)
    pytest.importorskip(library, reason="the extra of the adapter")
    config = PluginConfig.model_validate({"name": f"treadle_agents.adapters.{name}", **told})
    assert plugins.check("treadle.agents", config) == []
    return plugins.build("treadle.agents", config)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gymnasium:GymnasiumEnv", {"environment": "FrozenLake-v1", "actions": [*"abcd"]}),
        ("reasoning_gym:ReasoningGymEnv", {"system": "simple"}),
    ],
)
def test_an_env_is_made_as_a_recipe_says(model: Path, name: str, told: dict[str, Any]) -> None:
    assert isinstance(built(name, model=str(model), **told), Env)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mcp:McpAgent", {"servers": {"a": {"command": ["x"]}, "b": {"url": "http://b"}}}),
        ("textarena:TextArenaGame", {"game": "TicTacToe-v0", "players": 2, "seat": None}),
    ],
)
def test_a_chat_agent_is_made_as_a_recipe_says(name: str, told: dict[str, Any]) -> None:
    assert isinstance(built(name, **told), ChatAgent)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("seeds:Seeds", {"size": 2}),
        (
            "reasoning_gym:Mixture",
            {"size": 2, "parts": {"chain_sum": {"weight": 2, "config": {"max_terms": 3}}}},
        ),
    ],
)
def test_tasks_are_made_as_a_recipe_says(name: str, told: dict[str, Any]) -> None:
    source = built(name, **told)
    assert source.read(1) is not None
    assert source.read(2) is None
