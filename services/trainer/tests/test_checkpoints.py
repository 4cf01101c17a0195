import errno
import hashlib
import json
import logging
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from treadle_trainer import checkpoints
from treadle_trainer.adapters.folders import ASIDE
from treadle_trainer.adapters.local_checkpoints import LocalCheckpoints
from treadle_trainer.adapters.single import SingleBackend
from treadle_trainer.checkpoints import NoValidCheckpointError
from treadle_trainer.core.losses.ppo_clip import PpoClip
from treadle_trainer.core.schedule import Schedule
from treadle_trainer.core.step import StepSettings, update
from treadle_trainer.ports import CheckpointCorruptError, CheckpointStoreFullError

SCHEDULE = Schedule(1e-2, 2)
FILES = [
    "config.json",
    "generation_config.json",
    "manifest.json",
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.fixture
def store(tmp_path):
    return LocalCheckpoints(tmp_path / "checkpoints")


@pytest.fixture(scope="module")
def written(small, tmp_path_factory):
    """A store's directory, and its two checkpoints, newest first."""
    directory = tmp_path_factory.mktemp("written") / "checkpoints"
    store, backend = LocalCheckpoints(directory), SingleBackend(small)
    older = write(store, backend, 1)
    return directory, [write(store, backend, 2, older.digest), older]


@pytest.fixture
def backend(backend_class, table):
    return backend_class(table)


@pytest.fixture
def examples(make_examples):
    return make_examples(np.random.default_rng(0), 4)


def write(store, backend, step, parent=""):
    return checkpoints.write(
        store, backend, run_id="run", step=step, parent_digest=parent, schedule=SCHEDULE
    )


def newest_valid(store, found):
    return checkpoints.newest_valid(store, found, lambda *loaded: loaded)


def train(backend, examples, steps):
    for step in steps:
        update(
            backend,
            examples,
            loss=PpoClip(),
            settings=StepSettings(1000, 1.0),
            learning_rate=SCHEDULE(step),
        )


def digest(backend):
    total = hashlib.sha256()
    for name, tensor in backend.parameters().items():
        total.update(name.encode() + tensor.numpy().tobytes())
    return total.hexdigest()


def test_a_run_that_restores_takes_bitwise_the_same_steps(store, small, examples):
    whole = SingleBackend(small, weight_decay=0.1)
    train(whole, examples, [1, 2, 3])
    checkpoint = write(store, whole, 3)
    drawn = torch.rand(3)
    train(whole, examples, [4, 5])

    _, folder = newest_valid(store, [checkpoint])
    resumed = SingleBackend(folder, weight_decay=0.1)
    checkpoints.restore(checkpoint, folder, resumed, run_id="run", schedule=SCHEDULE)
    assert torch.equal(torch.rand(3), drawn)
    train(resumed, examples, [4, 5])
    assert digest(resumed) == digest(whole) != digest(SingleBackend(small))


def test_a_checkpoint_is_a_folder_that_says_what_it_holds(store, small, tmp_path):
    checkpoint = write(store, SingleBackend(small), 10, parent="ab" * 32)
    folder = tmp_path / checkpoint.path
    assert checkpoint.path == "checkpoints/step-000010"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    manifest = (folder / "manifest.json").read_bytes()
    assert hashlib.sha256(manifest).hexdigest() == checkpoint.digest
    state = json.loads((folder / "state.json").read_text())
    assert state["step"] == 10
    assert state["run_id"] == "run"
    assert state["parent_digest"] == "ab" * 32
    assert [path.name for path in folder.parent.iterdir()] == ["step-000010"]


DAMAGES = {
    "flipped": lambda path: path.write_bytes(
        bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]
    ),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "missing": lambda path: path.unlink(),
    "symlink": lambda path: (
        path.rename(path.parent.parent / "moved") and path.symlink_to(path.parent.parent / "moved")
    ),
}


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, "flipped") for name in FILES] + [(FILES[0], each) for each in DAMAGES],
)
def test_a_damaged_file_is_named_and_the_older_checkpoint_is_used(
    written, tmp_path, caplog, name, damage
):
    directory, (newer, older) = written
    store = LocalCheckpoints(shutil.copytree(directory, tmp_path / "checkpoints"))
    DAMAGES[damage](tmp_path / newer.path / name)
    with pytest.raises(CheckpointCorruptError) as raised:
        store.open(newer)
    assert name in raised.value.message
    with caplog.at_level(logging.ERROR):
        found, _ = newest_valid(store, [newer, older])
    assert found == older
    assert name in caplog.text


@pytest.mark.parametrize("name", ["model-00002.safetensors", "adapter_config.json"])
def test_a_file_that_the_manifest_does_not_name_is_refused(store, backend, tmp_path, name):
    checkpoint = write(store, backend, 1)
    (tmp_path / checkpoint.path / name).write_text("{}")
    with pytest.raises(CheckpointCorruptError, match=name):
        store.open(checkpoint)


@pytest.mark.parametrize(
    "path",
    [
        "checkpoints/../checkpoints/step-000001",
        "/etc/step-000001",
        "checkpoints/.aside-1",
        "checkpoints",
        "",
    ],
)
def test_a_path_out_of_the_directory_is_refused(store, backend, path):
    checkpoint = replace(write(store, backend, 1), path=path)
    with pytest.raises(CheckpointCorruptError) as raised:
        store.open(checkpoint)
    assert raised.value.field == "path"


def test_a_manifest_that_names_a_path_is_refused(store, backend, tmp_path):
    checkpoint = write(store, backend, 1)
    path = tmp_path / checkpoint.path / "manifest.json"
    content = json.loads(path.read_text())
    content["files"]["../state.json"] = content["files"].pop("state.json")
    path.write_text(json.dumps(content))
    forged = replace(checkpoint, digest=hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(CheckpointCorruptError) as raised:
        store.open(forged)
    assert raised.value.field == "manifest.json.files"


def test_when_all_are_damaged_the_error_lists_what_failed_and_nothing_is_deleted(
    store, backend, tmp_path
):
    written = [write(store, backend, step) for step in (2, 1)]
    for checkpoint, name in zip(written, ("model.safetensors", "state.json"), strict=True):
        DAMAGES["flipped"](tmp_path / checkpoint.path / name)
    with pytest.raises(NoValidCheckpointError) as raised:
        newest_valid(store, written)
    for checkpoint, name in zip(written, ("model.safetensors", "state.json"), strict=True):
        assert f"{checkpoint.path}: {name}" in raised.value.message
        assert (tmp_path / checkpoint.path).is_dir()


def test_a_checkpoint_of_another_run_is_refused(store, backend):
    checkpoint = write(store, backend, 1)
    _, folder = newest_valid(store, [checkpoint])
    with pytest.raises(CheckpointCorruptError) as raised:
        checkpoints.restore(checkpoint, folder, backend, run_id="other", schedule=SCHEDULE)
    assert raised.value.field == "run_id"


def test_only_what_the_ledger_gave_up_is_deleted(store, backend, tmp_path):
    written = [write(store, backend, step) for step in (1, 2, 3)]
    unknown = tmp_path / "checkpoints" / "notes"
    unknown.mkdir()
    store.mark_latest(written[2])
    store.retain(written[1:])
    assert [(tmp_path / checkpoint.path).exists() for checkpoint in written] == [0, 1, 1]
    assert unknown.is_dir()
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000003\n"


def test_a_step_that_is_checkpointed_again_leaves_the_old_folder_alone(store, backend):
    first = write(store, backend, 4)
    second = write(store, backend, 4, parent="cd" * 32)
    assert first.path != second.path
    for checkpoint in (first, second):
        store.open(checkpoint)


def test_what_a_crash_left_aside_is_no_checkpoint_and_is_removed(store, tmp_path):
    left = tmp_path / "checkpoints" / f"{ASIDE}0"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    opened_since = LocalCheckpoints(tmp_path / "checkpoints")
    assert opened_since.remove_leftovers() == [left.name]
    assert not left.exists()


def test_a_store_that_wakes_late_removes_nothing_that_its_successor_writes(store, tmp_path):
    def fill(folder):
        (folder / "model.safetensors").write_bytes(b"whole")
        assert store.remove_leftovers() == []

    successor = LocalCheckpoints(tmp_path / "checkpoints")
    assert successor.write(1, fill).path == "checkpoints/step-000001"


def test_a_store_that_wakes_late_deletes_no_checkpoint_of_its_successor(store, backend, tmp_path):
    old = write(store, backend, 1)
    mine = write(store, backend, 2, old.digest)
    successor = LocalCheckpoints(tmp_path / "checkpoints")
    theirs = write(successor, backend, 3, mine.digest)

    store.retain([mine])  # what the ledger said before the successor took over

    with pytest.raises(CheckpointCorruptError):
        store.open(old)
    for checkpoint in (mine, theirs):
        successor.open(checkpoint)


def test_a_store_that_wakes_late_replaces_no_checkpoint_of_its_successor(store, backend, tmp_path):
    successor = LocalCheckpoints(tmp_path / "checkpoints")
    theirs = []

    def fill(folder):
        backend.save_policy(folder)
        theirs.append(write(successor, backend, 2))

    late = store.write(2, fill)

    assert late.path == "checkpoints/step-000002.1"
    successor.open(theirs[0])


def test_a_writer_that_fails_leaves_nothing(store, tmp_path):
    def fill(folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.write(1, fill)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_disk_that_fills_while_tensors_are_written_is_told_from_other_errors(store, tmp_path):
    def full(folder):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    def forbidden(folder):
        raise SafetensorError("I/O error: Permission denied (os error 13)")

    with pytest.raises(CheckpointStoreFullError, match="No space left"):
        store.write(1, full)
    with pytest.raises(SafetensorError):
        store.write(1, forbidden)

    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_a_disk_that_is_full_only_at_an_fsync_or_a_rename_is_full(
    store, tmp_path, monkeypatch, name
):
    real, calls = getattr(os, name), []

    def full(*arguments):
        calls.append(arguments)
        if len(calls) == fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    def fill(folder):
        (folder / "model.safetensors").write_bytes(b"whole")

    monkeypatch.setattr(os, name, full)
    for fails_at in range(1, 99):  # noqa: B007, `full` reads it
        calls.clear()
        try:
            stored = store.write(1, fill)
        except CheckpointStoreFullError:
            continue
        break

    assert fails_at == len(calls) + 1 > 1
    (tmp_path / stored.path / "manifest.json").read_bytes()
    assert not list((tmp_path / "checkpoints").glob(f"{ASIDE}*"))
