"""Agents that break their contract, and payloads without room: rollout, refit and the real ledger.

The test is the trainer; agents are those of `services/rollout/tests/bad_agents.py`, played by the
real worker processes with the scripted engine. The ids are those of the bad-input catalogue.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from badinput_harness import (
    ROOT,
    Disk,
    Peer,
    Service,
    begin_without_version,
    experience_settings,
    refit_beside,
    serving,
    sums,
    until,
)
from tokenizers import AddedToken, Tokenizer, decoders, models

from treadle_experience.adapters.sqlite import FILE_NAME, read_journal
from treadle_experience.core.state import Cause
from treadle_experience.core.transitions import AttemptEnded, TaskOpened
from treadle_weights.layouts import whole
from treadle_weights.shared_memory import SharedMemory
from treadle_weights.wire import arena_from_wire, digests_to_wire, layout_to_wire

pytestmark = pytest.mark.processes

AGENTS = ROOT / "services" / "rollout" / "tests" / "bad_agents.py"
VOCABULARY = {"a": 0, "<end>": 1, "b": 2, "ab": 3, "c": 4, "ca": 5}
LAYOUT = whole({"bigrams": ("float32", (len(VOCABULARY), len(VOCABULARY)))})
SPENT = ["filtered", "ready"]


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE(VOCABULARY, [("a", "b"), ("c", "a")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))


@dataclass
class Loop:
    """A run's three services, and what a trainer asks of two of them."""

    directory: Path
    experience: Peer
    refit: Peer
    rollout: Service

    def publish(self, stop_logit: float) -> None:
        """Version 1: every token as likely as any other, but for the stop token."""
        sender = SharedMemory(self.directory).sender("run")
        table = np.zeros((len(VOCABULARY), len(VOCABULARY)), np.float32)
        table[:, VOCABULARY["<end>"]] = stop_logit
        opened = self.refit(
            "OpenVersion", trainer_epoch=1, request_id="v1", layout=layout_to_wire(LAYOUT)
        )
        arena = arena_from_wire(opened.arena)
        digests = digests_to_wire(sender.send(arena, LAYOUT, [("bigrams", table)]))
        self.refit("SendVersion", trainer_epoch=1, version=opened.version, digests=digests)
        until(lambda: "serving version 1" in self.log.read_text())
        sender.close()

    @property
    def log(self) -> Path:
        return self.directory / "rollout.log"

    def failures(self) -> dict[str, list[tuple[str, str]]]:
        """Class and message of every failed attempt, by what its task told its agent to do."""
        does: dict[str, str] = {}
        found: dict[str, list[tuple[str, str]]] = {}
        for happened in read_journal(self.directory / FILE_NAME).journal:
            if isinstance(happened, TaskOpened):
                does |= dict.fromkeys(happened.episode_ids, happened.spec["do"])
            elif isinstance(happened, AttemptEnded) and happened.cause is Cause.FAILED:
                failure = (happened.failure_class, happened.message)
                found.setdefault(does[happened.episode_id], []).append(failure)
        return found


@contextlib.contextmanager
def looping(
    directory: Path, does: list[str], agent: dict[str, Any], inside: tuple[str, ...], **run: Any
) -> Iterator[Loop]:
    """Runs the services on one task for each of `does`, with one episode each."""
    save_tokenizer(directory)
    settings = experience_settings(
        directory, directory, group_size=1, tasks_per_step=1, max_lag=len(does), retries=1, **run
    )
    tasks = [json.dumps({"prompt": "c", "do": do}) for do in does]
    (directory / "tasks.jsonl").write_text("\n".join(tasks) + "\n", encoding="utf-8")
    experience = Service("experience", directory, settings, inside)
    refit = refit_beside(experience)
    rollout = {
        "run": settings["run"],
        "transport": refit.settings["transport"],
        "listen": f"unix:{directory}/rollout",
        "experience_address": settings["listen"],
        "refit_address": refit.settings["listen"],
        "engine": {"name": "scripted", "vocabulary": len(VOCABULARY), "max_context": 32768},
        "agent": agent,
        "slots": 4,
        "workers": 4,  # an episode each: what is killed is nobody else's
        "max_turns": 4,
        "grace_s": 1,
    }
    playing = Service("rollout", directory, rollout, inside, log=directory / "rollout.log")
    with contextlib.ExitStack() as stack:
        ledger = stack.enter_context(serving(experience))
        begin_without_version(ledger)
        fleet = stack.enter_context(serving(refit))
        stack.enter_context(serving(playing))
        yield Loop(directory, ledger, fleet, playing)


BAD = {
    "raises": ("environment", "ValueError: no such tool; token=***"),  # A1
    "exits": ("environment", "SystemExit: 3"),  # A1
    "sleeps": ("environment", "hung"),  # A2
    "floods": ("environment", "hung"),  # A4
    "mistypes": ("environment", "agent.result: expected a treadle_agents"),  # A5
    "nan": ("environment", "agent.result.reward: expected a number"),  # A5
    "dies": ("infrastructure", "exit status 7"),  # A7
}


def test_bad_agents_fail_by_class_are_tried_again_and_harm_nobody_else(tmp_path: Path) -> None:
    does = [*BAD, "well", "well"]
    agent = {"name": f"{AGENTS}:Chosen"}
    with looping(tmp_path, does, agent, (), deadline_s=3.0, lease_s=2.9) as loop:
        loop.publish(stop_logit=0.0)
        until(lambda: settled(loop.experience) == len(does))
        described = loop.experience("GetRun")
        failures = loop.failures()
        assert loop.rollout.is_up
        assert loop.rollout.stop()[0] == 0
        kept = sum(path.stat().st_size for path in (tmp_path / "logs").iterdir())

    assert dict(described.tasks) == {"filtered": len(BAD), "ready": 2}
    assert set(failures) == set(BAD)
    for do, (failure_class, says) in BAD.items():
        assert {found for found, _ in failures[do]} == {failure_class}
        assert [message for _, message in failures[do] if says not in message] == []
        assert len(failures[do]) == 2
    assert "hunter2" not in json.dumps(failures)
    assert kept < 16 * 1024 * 1024  # at most 1 MiB a second, of two attempts
    assert sums(tmp_path)["acknowledged"] == 2


def settled(peer: Peer) -> int:
    """Tasks of which no more is to come."""
    tasks = peer("GetRun").tasks
    return sum(tasks[state] for state in SPENT)


def test_payloads_wait_for_room_and_none_is_lost(
    tmp_path: Path, make_disk: Callable[..., Disk]
) -> None:
    (tmp_path / "payloads").mkdir()
    disk = make_disk("1m", tmp_path / "payloads")
    agent = {"name": f"{AGENTS}:Counting", "turns": 2}
    sampling = {"max_tokens": 8000}  # ten bytes a token: more than travels inline
    with looping(tmp_path, ["well"] * 4, agent, disk.inside, sampling=sampling) as loop:
        until(lambda: disk.seen("tmp").is_dir())
        disk.fill()
        loop.publish(stop_logit=-1e9)
        until(lambda: "PAYLOAD_STORE_FULL" in loop.log.read_text())
        assert settled(loop.experience) == 0

        disk.make_room()
        until(lambda: settled(loop.experience) == 4)
        described = loop.experience("GetRun")
        assert loop.rollout.is_up

    assert dict(described.tasks) == {"ready": 4}
    assert dict(described.failures) == {}
