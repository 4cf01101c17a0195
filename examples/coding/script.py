"""What the engine `scripted` says to a coding harness: it calls its shell, looks, and ends."""

import json
import re
from collections.abc import Iterator
from typing import Any
from zlib import crc32

from treadle_rollout.adapters.script import Asked

SHELLS = ("exec_command", "shell", "shell_command")
"""What harnesses call a tool that runs commands."""
ASKED = re.compile(r"return what (\S+) is")
WRITE = "printf 'def value():\\n    return %s\\n' '{}' > solution.py && cat solution.py"
WRITTEN = "def value():\n    return "
"""What the command prints, and what is not in it."""
END = "<|im_end|>"


def says(asked: Asked) -> str:
    """The turn of an episode; in half of them it is off by one, so that there is what to learn."""
    return f"{answer(asked.text, '+1' if crc32(asked.episode.encode()) % 2 else '')}{END}"


def answer(text: str, error: str = "") -> str:
    """Writes the file by one command, and is done when the prompt shows what was written."""
    tools = {tool["name"]: tool["parameters"]["properties"] for tool in _tools(text)}
    shell = next((name for name in SHELLS if name in tools), None)
    found = ASKED.search(text)
    if shell is None or found is None:
        return "A small thing"  # a title, a summary
    if WRITTEN in text or json.dumps(WRITTEN)[1:-1] in text:
        return "solution.py returns it."
    word = "cmd" if "cmd" in tools[shell] else "command"
    command = WRITE.format(f"{found[1]}{error}")
    listed = tools[shell][word].get("type") == "array"
    arguments = {word: ["bash", "-lc", command] if listed else command}
    call = json.dumps({"name": shell, "arguments": arguments})
    return f"I will write it.\n<tool_call>\n{call}\n</tool_call>"


def _tools(text: str) -> Iterator[dict[str, Any]]:
    """The definitions that the template wrote, one behind the other."""
    block = re.search(r"<tools>(.*?)</tools>", text, re.DOTALL)
    rest = block[1].strip() if block else ""
    while rest:
        tool, end = json.JSONDecoder().raw_decode(rest)
        yield tool["function"]
        rest = rest[end:].strip()
