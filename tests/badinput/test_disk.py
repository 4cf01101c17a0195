"""A full disk: nothing is acknowledged, nothing is lost, and all goes on when there is room."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from badinput_harness import (
    Disk,
    Peer,
    Service,
    attempt,
    begin,
    completion,
    experience_settings,
    lease,
    result,
    segment,
    serving,
    until,
)

from treadle_payloads.codec import encode_payload

pytestmark = pytest.mark.processes

OUTAGE_S = 3.0
"""How long a run has to live on a full disk."""
TRAINED_S = 240.0
"""For a dozen steps, which take a dozen seconds where nobody else uses the two cores."""
SERVICES = ("experience", "refit", "rollout", "trainer")


def heavy() -> Any:
    """A result of about 40 KB that stays in the ledger."""
    data = encode_payload([segment(4000)])
    return result(data, num_tokens=4000, num_trained=2000)


@pytest.fixture
def service(make_disk: Callable[[str], Disk], tmp_path: Path) -> tuple[Disk, Service]:
    disk = make_disk("3m")
    settings = experience_settings(tmp_path, tmp_path)
    settings["run"] |= {"dir": str(disk.path)}
    return disk, Service("experience", tmp_path, settings, disk.inside)


def complete_until_refused(peer: Peer, tickets: list[Any]) -> tuple[list[Any], Any, Any]:
    """The tickets that were acknowledged, the one that was not, and how it was refused."""
    for place, ticket in enumerate(tickets):
        request = peer.request("CompleteEpisode", **completion(ticket, heavy()))
        if found := peer.tried("CompleteEpisode", request):
            return tickets[:place], ticket, found
    raise AssertionError("the disk is not full")


def refusals_of_others(peer: Peer, ticket: Any) -> list[Any]:
    """How every kind of caller is refused."""
    return [
        peer.refused("LeaseTickets", replica_id="r2", served_version=1, max_tickets=1, slots=8),
        peer.refused("RenewLeases", replica_id="r1", attempts=[attempt(ticket)]),
        peer.refused("ClaimStep", trainer_epoch=1, step=1),
        peer.refused("AcquireRun", holder="other", checkpoint_digest="a" * 64),
        peer.refused(
            "CommitCheckpoint",
            trainer_epoch=1,
            digest="b" * 64,
            parent_digest="a" * 64,
            step=0,
            path="c/1",
        ),
        peer.refused("GetRun"),
    ]


def test_a_full_ledger_refuses_until_there_is_room_and_loses_nothing(
    service: tuple[Disk, Service],
) -> None:
    disk, experience = service
    with serving(experience) as peer:
        begin(peer)
        tickets = lease(peer, max_tickets=200)
        peer("CompleteEpisode", **completion(tickets.pop(), heavy()))
        disk.fill()
        acknowledged, refused, found = complete_until_refused(peer, tickets)
        others = refusals_of_others(peer, refused)
        until(lambda: peer.health() == "NOT_SERVING")
        left = tickets[len(acknowledged) + 1 :]
        _, _, later = complete_until_refused(peer, left)

        disk.make_room()
        until(lambda: peer.health() == "SERVING")
        again = peer("CompleteEpisode", **completion(refused, heavy()))
        peer("CompleteEpisode", **completion(left[0], heavy()))
        epoch = peer("AcquireRun", holder="other", checkpoint_digest="a" * 64).trainer_epoch
        described = peer("GetRun")
        assert experience.is_up
        experience.kill()
        counted = disk.fsck()

    for each in (found, *others, later):
        assert (each.code, each.reason) == ("RESOURCE_EXHAUSTED", "LEDGER_FULL")
        assert each.retry_after_s == 1.0
        assert "full" in each.message
    assert again.duplicate  # it was decided before it was known that there is no room
    assert epoch == 2
    assert described.position == counted["position"]
    assert counted["acknowledged"] == len(acknowledged) + 3


def test_a_service_that_starts_on_a_full_disk_waits_for_room(
    service: tuple[Disk, Service],
) -> None:
    disk, experience = service
    with serving(experience) as peer:
        begin(peer)
        tickets = lease(peer, max_tickets=200)
        disk.fill()
        acknowledged, _, _ = complete_until_refused(peer, tickets)
        experience.kill()
        process = experience.start()
        line = ""
        while "waiting: " not in line:
            line = process.stderr.readline()
            assert line, "it ended"
        assert experience.is_up

        disk.make_room()
        until(lambda: peer.health() == "SERVING")
        assert peer("GetRun").episodes["done"] == len(acknowledged)
        assert experience.stop()[0] == 0
    assert disk.fsck()["acknowledged"] == len(acknowledged)


class Train:
    """`treadle train` on a small recipe, in a directory on a disk."""

    def __init__(self, disk: Disk, directory: Path, *overrides: str) -> None:
        self.disk = disk
        self.directory = directory
        command = [sys.executable, "-m", "treadle_cli.main", "train", "recipes/calculator.yaml"]
        small = (
            "experience.steps=12",
            "experience.tasks_per_step=4",
            "experience.group_size=4",
            "experience.evaluation=null",
            "rollout.slots=16",
            "trainer.checkpoint_every=2",
        )
        self.process = subprocess.Popen(
            [*disk.inside, *command, f"run.dir={directory}", *small, *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def path(self, *parts: str) -> Path:
        return self.disk.seen().joinpath(*self.directory.relative_to(self.disk.path).parts, *parts)

    def read(self, *parts: str) -> str:
        path = self.path(*parts)
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, holds: Callable[[], bool]) -> None:
        def look() -> bool:
            assert self.process.poll() is None, self.process.stdout.read()
            return holds()

        until(look, timeout_s=TRAINED_S)


@pytest.fixture
def train() -> Iterator[Callable[..., Train]]:
    """Starts `treadle train`; it and its services are gone when the test is."""
    runs: list[Train] = []

    def start(*args: Any) -> Train:
        runs.append(Train(*args))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.returncode is None:
            run.process.kill()  # its services see it go, and drain
            run.process.communicate()


@pytest.mark.e2e
def test_a_run_whose_disk_fills_waits_and_ends_well_when_there_is_room(
    make_disk: Callable[[str], Disk], train: Callable[..., Train]
) -> None:
    disk = make_disk("48m")
    run = train(disk, disk.path)
    run.until(lambda: '"name": "step"' in run.read("metrics", "trainer.jsonl"))

    disk.fill()
    # A log on the same disk may have no room for the line that says so.
    run.until(lambda: any("LEDGER_FULL" in run.read("logs", f"{name}.log") for name in SERVICES))
    over = time.monotonic() + OUTAGE_S
    run.until(lambda: time.monotonic() > over)
    kept = list(run.path("checkpoints").glob("step-*/manifest.json"))
    disk.make_room()
    told, _ = run.process.communicate(timeout=TRAINED_S)

    assert run.process.returncode == 0, told
    assert kept
    logs = {name: run.read("logs", f"{name}.log") for name in SERVICES}
    lives = {name: log.count("serving on") for name, log in logs.items()}
    assert lives == dict.fromkeys(SERVICES, 1)
    assert "nothing is acknowledged until there is room" in logs["experience"]
    assert "there is room again" in logs["experience"]
    counted = disk.fsck()
    assert (counted["trained_step"], counted["consumed"]) == (12, 12 * 4 * 4)
