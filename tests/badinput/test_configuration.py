"""What is wrong with a recipe, an address or a directory ends the process with 2, before it works.

`treadle train` and the real services; the ids are those of the bad-input catalogue.
"""

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from badinput_harness import ROOT, Service, begin, experience_settings, serving, sums

from treadle_cli import train

pytestmark = pytest.mark.processes

BAD_CONFIGURATION = 2
SAID = "configuration: "


@pytest.fixture
def refused(monkeypatch: Any, capsys: Any) -> Callable[..., str]:
    """What `treadle train` says of a recipe that it refuses."""
    monkeypatch.chdir(ROOT)

    def run(*overrides: str) -> str:
        assert train.main(["recipes/calculator.yaml", *overrides]) == BAD_CONFIGURATION
        return capsys.readouterr().err

    return run


RECIPES = [
    ("C1-typo", ["experience.max_lg=1"], "unknown key experience.max_lg; did you mean"),
    ("C1-nested", ["trainer.optimizer.lr=1"], "unknown key trainer.optimizer.lr"),
    ("C1-plugin", ["trainer.loss.clip_hig=1"], "did you mean clip_high"),
    ("C2-removed", ["trainer.max_staleness=1"], "unknown key trainer.max_staleness; valid here:"),
    (
        "C3-transports",
        ["refit.transport={name: shared_memory, directory: /tmp}"],
        "rollout.transport: expected {name: shared_memory, directory: /tmp} as refit.transport",
    ),
    ("C3-names", ["experience.evaluation.sets=[]"], "experience.evaluation.sets"),
    (
        "C4-segment",
        ["trainer.microbatch_tokens=64"],
        "trainer.microbatch_tokens: expected at least 128 = rollout.engine.max_context",
    ),
    ("C4-none", ["experience.group_size=0"], "experience.group_size"),
    (
        "C5-lease",
        ["experience.lease_s=60"],
        "lease_s: expected less than deadline_s 60, got 60",
    ),
    (
        "C5-verify",
        ["refit.verify_timeout_s=10"],
        "verify_timeout_s: expected more than dead_after_s 15, got 10",
    ),
    ("C5-grace", ["rollout.grace_s=40"], "rollout.grace_s"),
    ("C8", ["experience.listen=0.0.0.0:7000"], "experience.listen: expected unix:/"),
    ("G4-run", ["run.id=../other"], "run.id"),
]


@pytest.mark.parametrize(
    ("overrides", "says"), [pytest.param(*row[1:], id=row[0]) for row in RECIPES]
)
def test_a_recipe_that_cannot_be_is_refused(
    tmp_path: Path, refused: Callable[..., str], overrides: list[str], says: str
) -> None:
    assert says in refused(f"run.dir={tmp_path}/run", *overrides)
    assert not (tmp_path / "run").exists()


def test_c6_a_directory_of_another_recipe_run_or_tokenizer_is_refused_with_the_difference(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(ROOT / "examples/calculator/policy", policy)
    run = tmp_path / "run"
    run.mkdir()
    recipe = {"run": {"id": "first", "seed": 7}}
    digests = {"config.json": "c" * 64, "tokenizer.json": "d" * 64}
    record = {"id": "first", "recipe": recipe, "model": digests}
    (run / "run.json").write_text(json.dumps(record))

    told = refused(f"run.dir={run}", f"run.model={policy}", "run.id=second")

    assert f"run.id: {run} was started with 'first', not 'second'" in told
    assert "run.seed" in told
    assert "started with 7, not 0; use another run.dir, or --allow-change run.seed" in told
    assert "started with a tokenizer.json of sha256 dddddddddddd, not of" in told
    assert "started with a config.json of sha256 cccccccccccc, not of" in told


def test_c10_a_directory_that_cannot_be_written_is_told(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    (tmp_path / "file").write_text("not a directory")

    told = refused(f"run.dir={tmp_path}/file/run")

    assert f"run.dir: nothing can be written in {tmp_path}/file/run: Not a directory" in told


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        pytest.param(
            ["experience.ledger={name: redis, url: 'redis://127.0.0.1:1/0'}"],
            "experience.ledger.url: nothing answers at redis://127.0.0.1:1/0: ",
            id="C10-redis",
        ),
        pytest.param(
            ["run.doorbell={name: nats, url: 'nats://127.0.0.1:1'}"],
            "run.doorbell.url: nothing answers at nats://127.0.0.1:1: ",
            id="C10-nats",
        ),
        pytest.param(
            ["run.doorbell={name: nats, ulr: x}"],
            "run.doorbell: unknown key ulr of plugin 'nats'; did you mean url",
            id="C1-doorbell",
        ),
    ],
)
def test_c10_a_server_that_is_not_there_is_told(
    tmp_path: Path, refused: Callable[..., str], overrides: list[str], says: str
) -> None:
    assert says in refused(f"run.dir={tmp_path}/run", *overrides)


def test_c10_a_port_that_is_taken_is_told(
    tmp_path: Path, refused: Callable[..., str], busy: str
) -> None:
    said = refused(f"run.dir={tmp_path}/run", f"refit.listen={busy}")
    assert f"refit.listen: {busy} cannot be listened on: Address already in use" in said


def test_c10_a_file_system_that_cannot_be_written_or_is_too_small_is_told(tmp_path: Path) -> None:
    def train_on(options: str) -> str:
        """What the real command says on a file system of its own."""
        mount = f'mount -t tmpfs -o {options} tmpfs {tmp_path} || exit 77; exec "$0" "$@"'
        inside = ["unshare", "-m", "--propagation", "private", "sh", "-c", mount]
        words = ["-m", "treadle_cli.main", "train", "recipes/calculator.yaml"]
        done = subprocess.run(
            [*inside, sys.executable, *words, f"run.dir={tmp_path}/run"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode in (1, 77) and "permi" in done.stderr.lower():
            pytest.skip(f"a file system of its own is not permitted: {done.stderr}")
        assert done.returncode == BAD_CONFIGURATION, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    assert "Read-only file system" in train_on("ro")
    assert "MB of run.model for checkpoints; 1.0 MB are free" in train_on("size=1m")


@pytest.fixture
def experience(tmp_path: Path) -> Service:
    return Service("experience", tmp_path, experience_settings(tmp_path, tmp_path))


@pytest.fixture
def refit(tmp_path: Path) -> Service:
    settings = {
        "run": {"id": "run", "dir": str(tmp_path), "model": str(tmp_path)},
        "listen": f"unix:{tmp_path}/refit",
        "experience_address": f"unix:{tmp_path}/experience",
    }
    return Service("refit", tmp_path, settings)


@pytest.fixture
def busy() -> Iterator[str]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("name", ["experience", "refit"])
def test_a_service_refuses_what_it_cannot_serve(
    request: Any, name: str, busy: str, tmp_path: Path
) -> None:
    service: Service = request.getfixturevalue(name)

    unknown = service.ended("listn=unix:x", "run.sed=1")
    beyond = service.ended("listen=0.0.0.0:0")
    taken = service.ended(f"listen={busy}")

    assert [status for status, _ in (unknown, beyond, taken)] == [BAD_CONFIGURATION] * 3
    assert f"{SAID}unknown key listn; did you mean listen" in unknown[1]
    assert f"{SAID}unknown key run.sed; did you mean run.seed" in unknown[1]
    assert f"{SAID}listen: expected unix:/path or a loopback" in beyond[1]
    assert f"{SAID}listen: expected an address that is free, got {busy}" in taken[1]


def test_c6_a_ledger_of_another_run_or_of_other_fixed_rules_is_left_alone(
    experience: Service,
) -> None:
    with serving(experience) as peer:
        begin(peer)
        assert experience.stop()[0] == 0
    before = sums(experience.directory)

    other_run = experience.ended("run.id=other")
    other_group = experience.ended("group_size=3")

    assert [other_run[0], other_group[0]] == [BAD_CONFIGURATION] * 2
    assert f"{SAID}run.id: expected run, whose ledger lies in run.dir, got other" in other_run[1]
    assert f"{SAID}group_size: expected 64 as the run began with, got 3" in other_group[1]
    assert "Traceback" not in other_run[1] + other_group[1]
    assert sums(experience.directory) == before
