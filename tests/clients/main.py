"""`make clients`: stock clients, each headless, against the gateway with a policy that calls tools.

The task of each is really done (a file is written by a command that the policy asked for), and what
is captured is what the policy sampled, token for token, all of it trained once.
"""

import argparse
import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from stock import CLIENTS, Client, Place, environment

from treadle_agents.processes import Ended, run_tree
from treadle_core.episodes import Segment
from treadle_core.tickets import Sampling
from treadle_gateway.settings import GatewaySettings
from treadle_gateway.terms import Access
from treadle_gateway.testing import MODEL, Call, Scripted, World, serving, write_model
from treadle_runtime.measures import Measure, report

INSTALLED = Path(__file__).resolve().parents[2] / ".clients"
DEADLINE_S = 300.0
MAX_CONTEXT = 600_000
"""Tokens are bytes here, and a client's first request may hold 60,000."""
SHELLS = ("Bash", "bash", "run_shell_command", "shell_command", "exec_command", "shell")
"""What clients call a tool that runs commands; ours is `run_command`."""
SAID, COMMAND = "TREADLE-OK", "printf 'TREADLE-%s' OK | tee done.txt"
"""What the command prints is not in the command, so that only its result shows it."""


def says(prompt: str) -> str:
    """Calls the client's shell until it has seen the result, then ends."""
    tools = {tool["name"]: tool["parameters"] for tool in _tools(prompt)}
    shell = next((name for name in (*SHELLS, "run_command") if name in tools), None)
    if shell is None:
        return "A small thing"  # a title, a summary
    if SAID in prompt:
        return f"Done: {SAID}."
    return f"I will write it.\n<tool_call>\n{_call(shell, tools[shell])}\n</tool_call>"


def _tools(prompt: str) -> Iterator[dict[str, Any]]:
    """The definitions that the template wrote, one behind the other."""
    block = re.search(r"<tools>(.*?)</tools>", prompt, re.DOTALL)
    rest = block[1].strip() if block else ""
    while rest:
        tool, end = json.JSONDecoder().raw_decode(rest)
        yield tool["function"]
        rest = rest[end:].strip()


def _call(name: str, parameters: dict[str, Any]) -> str:
    """A call in a way of writing JSON that clients change on its way back."""
    properties = parameters["properties"]
    word = "cmd" if "cmd" in properties else "command"
    listed = properties[word].get("type") == "array"
    arguments: dict[str, Any] = {
        other: "a small thing" if properties[other].get("type") == "string" else False
        for other in parameters.get("required", [])
        if other != word
    }
    arguments[word] = ["bash", "-lc", COMMAND] if listed else COMMAND
    return f'{{"arguments" :  {json.dumps(arguments)},"name":"{name}" }}'


async def play(world: World, client: Client, folder: Path) -> dict[str, Any]:
    """Runs a client once; returns what came of it."""
    world.policy.reset()
    world.policy.says, world.policy.piece = says, 64
    access = await world.open(sampling=Sampling(temperature=1.0, max_tokens=4096))
    work = folder / "work"
    work.mkdir(parents=True)
    ended = await _run(client, access, folder, work)
    calls = list(world.policy.calls)
    captured = await world.pool.end(access.session)
    done = work / "done.txt"
    found = {
        "status": ended.status,
        "seconds": round(ended.seconds, 1),
        "turns": len(calls),
        "segments": len(captured.segments),
        "trained_tokens": sum(segment.num_trained for segment in captured.segments),
        "done": done.is_file() and done.read_text() == SAID and ended.ok,
        "exact": bool(calls) and is_exact(calls, captured.segments),
        "counts": {name: count for name, count in captured.counts.items() if count},
    }
    if not (found["done"] and found["exact"]):
        found["output"] = (ended.output + ended.errors)[-2000:].decode("utf-8", "replace")
    return found


async def _run(client: Client, access: Access, folder: Path, work: Path) -> Ended:
    place = Place(
        INSTALLED,
        home=folder / "home",
        openai_url=access.urls["openai"],
        anthropic_url=access.urls["anthropic"],
        key=access.token,
    )
    place.home.mkdir()
    return await run_tree(
        client.command(place),
        environment=environment(client, place),
        folder=work,
        deadline_s=DEADLINE_S,
    )


def is_exact(calls: Sequence[Call], segments: Sequence[Segment]) -> bool:
    """Every turn stands in a segment as it was prompted and sampled, and is trained once."""
    trained = sum(segment.num_trained for segment in segments)
    sampled = sum(len(call.sampled) for call in calls)
    return trained == sampled and all(
        any(_stands(call, segment) for segment in segments) for call in calls
    )


def _stands(call: Call, segment: Segment) -> bool:
    start = call.prompt.token_ids.size
    end = start + len(call.sampled)
    ids = np.concatenate([call.prompt.token_ids, np.array(call.sampled, np.int32)])
    return (
        np.array_equal(segment.token_ids[:end], ids)
        and bool(segment.sampled[start:end].all())
        and np.array_equal(segment.logprobs[start:end], np.array(call.logprobs, np.float32))
    )


async def play_all(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Runs the clients of these names, or all, one after another."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="treadle-clients-") as folder:
        model = Path(folder) / "model"
        policy = Scripted(write_model(model))
        settings = GatewaySettings(model, MODEL, MAX_CONTEXT, Path(folder) / "gateway.log")
        async with serving(settings, policy) as world:
            for client in CLIENTS:
                if names and client.name not in names:
                    continue
                found[client.name] = await play(world, client, Path(folder) / client.name)
                sys.stderr.write(f"{client.name}: {json.dumps(found[client.name])}\n")
        sys.stderr.write((Path(folder) / "gateway.log").read_text()[-2000:])
    return found


def measure(found: dict[str, dict[str, Any]]) -> Iterator[Measure]:
    """How many clients did their task, and how many were captured exactly."""
    total = len(found)
    for name, what in (("clients", "done"), ("clients_exact", "exact")):
        failed = [client for client, result in found.items() if not result[what]]
        value = total - len(failed)
        yield Measure(name, value, "clients", f"== {total}", {"failed": failed} if failed else {})
    for name, unit in (("turns", "turns"), ("trained_tokens", "tokens"), ("seconds", "s")):
        value = round(sum(each[name] for each in found.values()), 1)
        yield Measure(f"clients_{name}", value, unit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of the clients; all")
    return report(measure(asyncio.run(play_all(parser.parse_args().names))))


if __name__ == "__main__":
    raise SystemExit(main())
