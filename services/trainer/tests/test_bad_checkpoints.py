"""Checkpoints whose digests are right and whose content is not; folders that are no policy."""

import hashlib
import json
import shutil
import struct
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from treadle_core.errors import InvalidFieldError
from treadle_trainer import checkpoints
from treadle_trainer.adapters.local_checkpoints import LocalCheckpoints
from treadle_trainer.adapters.single import SingleBackend, load_model
from treadle_trainer.checkpoints import NoValidCheckpointError
from treadle_trainer.core.schedule import Schedule
from treadle_trainer.ports import CheckpointCorruptError

SCHEDULE = Schedule(1e-2)


def rewritten(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def forged_header(path, tensors, data=b""):
    header = json.dumps(tensors).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def entry(begin, end):
    return {"dtype": "F32", "shape": [2], "data_offsets": [begin, end]}


def changed(name, change):
    def apply(tensors):
        found = next(key for key in tensors if key.startswith(name))
        tensors[found] = change(tensors[found])

    return lambda path: rewritten(path, apply)


MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
KINDS = {
    "wrong-shape": (MODEL, changed("model.", lambda t: t[:-1].clone()), "mismatched_keys"),
    "wrong-dtype": (MODEL, changed("model.", lambda t: t.bfloat16()), "not float32"),
    "missing": (
        MODEL,
        lambda path: rewritten(path, lambda tensors: tensors.popitem()),
        "missing_keys",
    ),
    "extra": (
        MODEL,
        lambda path: rewritten(path, lambda tensors: tensors.update(odd=torch.zeros(2))),
        "unexpected_keys: odd",
    ),
    "optimizer-shape": (OPTIMIZER, changed("exp_avg.", lambda t: t[:-1].clone()), "unexpected"),
    "optimizer-dtype": (OPTIMIZER, changed("exp_avg.", lambda t: t.double()), "not float32"),
    "optimizer-missing": (
        OPTIMIZER,
        lambda path: rewritten(path, lambda tensors: tensors.popitem()),
        "incomplete",
    ),
    "optimizer-extra": (
        OPTIMIZER,
        lambda path: rewritten(path, lambda tensors: tensors.update(odd=torch.zeros(2))),
        "unexpected: odd",
    ),
    "huge-header": (
        MODEL,
        lambda path: path.write_bytes(struct.pack("<Q", 1 << 30) + b"{}"),
        "header too large",
    ),
    "overlapping": (
        MODEL,
        lambda path: forged_header(path, {"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
        "offset",
    ),
    "past-the-end": (
        OPTIMIZER,
        lambda path: forged_header(path, {"a": entry(0, 8)}, bytes(4)),
        "not fully covered",
    ),
    "pickled": (MODEL, lambda path: torch.save({}, path), "header too large"),
    "no-json": ("state.json", lambda path: path.write_text("{"), "state.json"),
}


@pytest.fixture(scope="module")
def written(small, tmp_path_factory):
    """A store with two checkpoints of one trained step, newest first."""
    directory = tmp_path_factory.mktemp("written") / "checkpoints"
    store, backend = LocalCheckpoints(directory), SingleBackend(small)
    for parameter in backend._parameters.values():
        parameter.grad = torch.ones_like(parameter)
    backend.update(1e-3)
    older = write(store, backend, 1)
    return directory, [write(store, backend, 2, older.digest), older]


def write(store, backend, step, parent=""):
    return checkpoints.write(
        store, backend, run_id="run", step=step, parent_digest=parent, schedule=SCHEDULE
    )


def forged(directory, checkpoint, name, change):
    """The checkpoint with a changed file, and a manifest and a digest that say it has to be so."""
    folder = directory.parent / checkpoint.path
    change(folder / name)
    data = (folder / name).read_bytes()
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    digest = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    return replace(checkpoint, digest=digest)


def load(checkpoint, folder):
    backend = SingleBackend(folder)
    checkpoints.restore(checkpoint, folder, backend, run_id="run", schedule=SCHEDULE)
    return checkpoint


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_cannot_be_loaded_is_refused_and_stays(written, tmp_path, kind):
    name, change, told = KINDS[kind]
    directory, (newer, _) = written
    copied = shutil.copytree(directory, tmp_path / "checkpoints")
    bad = forged(copied, newer, name, change)
    with pytest.raises(NoValidCheckpointError) as raised:
        checkpoints.newest_valid(LocalCheckpoints(copied), [bad], load)
    assert told in raised.value.message
    assert (tmp_path / bad.path).is_dir()


def test_a_checkpoint_of_wrong_tensors_is_passed_over_and_the_first_ten_named(
    written, tmp_path, caplog
):
    directory, (newer, older) = written
    copied = shutil.copytree(directory, tmp_path / "checkpoints")
    extra = {f"odd-{number:02d}": torch.zeros(1) for number in range(12)}
    bad = forged(
        copied, newer, MODEL, lambda path: rewritten(path, lambda tensors: tensors.update(extra))
    )
    assert checkpoints.newest_valid(LocalCheckpoints(copied), [bad, older], load) == older
    (told,) = (each.message for each in caplog.records if each.name == checkpoints.__name__)
    assert "odd-09" in told
    assert "odd-10" not in told


@pytest.mark.parametrize("name", ["model.pt", "optimizer.bin", "state.pkl"])
def test_a_pickle_is_neither_restored_nor_written(written, tmp_path, name):
    directory, (newer, _) = written
    copied = shutil.copytree(directory, tmp_path / "checkpoints")
    store = LocalCheckpoints(copied)
    bad = forged(copied, newer, name, lambda path: torch.save({}, path))
    with pytest.raises(CheckpointCorruptError) as raised:
        store.open(bad)
    assert (raised.value.field, raised.value.value) == ("manifest.json.files", name)
    with pytest.raises(InvalidFieldError, match=name):
        store.write(3, lambda folder: torch.save({}, folder / name))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        pytest.param(lambda f: (f / MODEL).unlink(), "no file named model.safetensors", id="none"),
        pytest.param(
            lambda f: (f / MODEL).unlink() or torch.save({}, f / "pytorch_model.bin"),
            "no file named model.safetensors",
            id="pickle",
        ),
        pytest.param(lambda f: (f / "config.json").write_text("{"), "JSON", id="config"),
        pytest.param(lambda f: (f / "config.json").unlink(), "config.json", id="no-config"),
    ],
)
def test_start_parameters_that_are_none_are_refused_by_name(small, tmp_path, spoil, told):
    folder = shutil.copytree(small, tmp_path / "policy")
    spoil(folder)
    with pytest.raises(InvalidFieldError, match="model: expected") as raised:
        load_model(folder)
    assert told in raised.value.message
