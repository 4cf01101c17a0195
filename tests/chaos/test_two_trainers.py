"""A trainer that stood still while a successor took over does nothing when it wakes."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from e2e_harness import ROOT

pytestmark = [pytest.mark.chaos, pytest.mark.e2e]

STANDS_STILL = {
    # About to write `latest`, to delete old checkpoints and to publish.
    "trainer.checkpoint.after_commit": 2,
    # The checkpoint is written and has its name.
    "trainer.checkpoint.before_commit": 3,
}
"""Where, and at which hit of the life that comes to it first."""


def journal(run) -> list[tuple[str, dict]]:
    path = run.directory / "ledger.sqlite"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        rows = db.execute("SELECT kind, body FROM journal ORDER BY position").fetchall()
    return [(kind, json.loads(body)) for kind, body in rows]


def of_kind(run, kind: str) -> list[dict]:
    return [body for found, body in journal(run) if found == kind]


def is_stopped(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return stat.rpartition(")")[2].split()[0] == "T"


@contextlib.contextmanager
def another_trainer(run, directory: Path):
    """The same configuration, at another address; ended at the end."""
    config = directory / "another.yaml"
    config.write_text((run.directory / "config" / "trainer.yaml").read_text())
    listen = f"listen=unix:{directory / 'another.sock'}"
    command = [sys.executable, "-m", "treadle_trainer.main", "--config", str(config), listen]
    with (directory / "another.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(600)
def test_a_trainer_that_wakes_after_its_successor_took_over_changes_nothing(
    make_run, tmp_path, monkeypatch
) -> None:
    spent = tmp_path / "spent"
    spent.mkdir()
    armed = ",".join(f"{name}=stop@{hit}" for name, hit in STANDS_STILL.items())
    # Its supervisor would end a trainer that stands still for as long as a slow machine may need.
    run = make_run("experience.steps=24", "experience.evaluation=null", "run.hung_s=600")
    with monkeypatch.context() as environment:
        environment.setenv("TREADLE_FAILPOINTS", armed)
        environment.setenv("TREADLE_FAILPOINTS_SPENT", str(spent))
        run.start()

    for name in STANDS_STILL:
        run.wait_until((spent / name).exists)
        stopped = run.service_pids()["trainer"]
        run.wait_until(lambda pid=stopped: is_stopped(pid))
        epoch = len(of_kind(run, "trainer_acquired"))
        with another_trainer(run, tmp_path):
            run.wait_until(
                lambda epoch=epoch: any(
                    checkpoint["trainer_epoch"] > epoch
                    for checkpoint in of_kind(run, "checkpoint_committed")
                )
            )
        os.kill(stopped, signal.SIGCONT)
        run.wait_until(
            lambda pid=stopped: pid in [d["pid"] for d in run.rows("supervisor", "death")]
        )
        (death,) = (d for d in run.rows("supervisor", "death") if d["pid"] == stopped)
        assert death["status"] == 1
        assert f"trainer_epoch {epoch} is fenced by epoch {epoch + 1}" in run.log("trainer")
    run.finish()

    epoch, announced, head = 0, {}, ""
    for kind, body in journal(run):
        if kind == "trainer_acquired":
            # Whoever took over restored the head of the ledger, whatever `latest` said.
            assert body["checkpoint_digest"] == head
            epoch = body["trainer_epoch"]
        elif kind == "checkpoint_committed":
            assert body["trainer_epoch"] == epoch
            head = body["digest"]
        elif kind == "step_trained":
            assert body["trainer_epoch"] == epoch
        elif kind == "version_announced":
            announced[body["version"]] = body["trainer_epoch"]
            assert body["trainer_epoch"] == epoch
        elif kind == "version_committed":
            assert announced[body["version"]] == epoch
    assert epoch == 1 + 2 * len(STANDS_STILL)
    last = of_kind(run, "checkpoint_committed")[-1]
    assert (
        f"checkpoints/{(run.directory / 'checkpoints' / 'latest').read_text().strip()}"
        == (last["path"])
    )
    measures = run.fsck()
    assert (measures["lost"], measures["trained_twice"]) == (0, 0)
