"""Checkpoints of a run: all that the next step depends on, in one folder.

A checkpoint is a Hugging Face folder of the policy, with the optimiser and `state.json` beside it.
It counts once the ledger has committed it.
"""

import base64
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch

from treadle_core.errors import Kind, TreadleError
from treadle_runtime.failpoints import failpoint
from treadle_trainer.core.schedule import Schedule
from treadle_trainer.ports import Backend, Checkpoint, CheckpointCorruptError, CheckpointStore

log = logging.getLogger(__name__)

STATE = "state.json"

T = TypeVar("T")


class NoValidCheckpointError(TreadleError):
    """The run has checkpoints, and none can be restored. Nothing was changed."""

    kind = Kind.CORRUPT
    reason = "NO_VALID_CHECKPOINT"


def write(
    store: CheckpointStore,
    backend: Backend,
    *,
    run_id: str,
    step: int,
    parent_digest: str,
    schedule: Schedule,
) -> Checkpoint:
    """Writes the present state, durably; nothing knows of it until the ledger commits it.

    Raises CheckpointStoreFullError.
    """
    state = {
        "run_id": run_id,
        "step": step,
        "parent_digest": parent_digest,
        "schedule": asdict(schedule),
        "rng": {"torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()},
    }

    def fill(folder: Path) -> None:
        backend.save_policy(folder)
        failpoint("trainer.checkpoint.after_policy")
        backend.save_optimizer(folder)
        failpoint("trainer.checkpoint.after_optimizer")
        (folder / STATE).write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")

    stored = store.write(step, fill)
    return Checkpoint(stored.digest, parent_digest, step, stored.path)


def newest_valid(
    store: CheckpointStore, found: Sequence[Checkpoint], load: Callable[[Checkpoint, Path], T]
) -> T:
    """What `load` makes of the first of `found`, newest first, that is whole and loads.

    `load` is given a checkpoint and its folder, every byte verified. What is passed over is logged
    as an error. Raises NoValidCheckpointError naming what failed of each.
    """
    failed: list[str] = []
    for checkpoint in found:
        try:
            return load(checkpoint, store.open(checkpoint))
        except TreadleError as error:
            if error.kind not in (Kind.CORRUPT, Kind.INVALID):
                raise
            log.error("passing over a checkpoint: %s", error.message)  # noqa: TRY400
            failed.append(error.message)
    raise NoValidCheckpointError(
        f"no checkpoint can be restored: {'; '.join(failed)}",
        field="checkpoints",
        limit="at least one whole",
        value=f"{len(failed)} bad",
    )


def _state_of(checkpoint: Checkpoint, folder: Path) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", json.loads((folder / STATE).read_text()))
    except ValueError as error:
        raise CheckpointCorruptError(
            f"checkpoint {checkpoint.path}: {STATE}: {error}",
            field=STATE,
            limit="JSON",
            value=str(error),
        ) from error


def restore(
    checkpoint: Checkpoint, folder: Path, backend: Backend, *, run_id: str, schedule: Schedule
) -> None:
    """Brings optimiser and random numbers back; the backend was built from the folder.

    A schedule that differs from the recorded one is used, and logged. Raises
    CheckpointCorruptError where the checkpoint is another run's.
    """
    state = _state_of(checkpoint, folder)
    if state["run_id"] != run_id:
        raise CheckpointCorruptError(
            f"checkpoint {checkpoint.path} is of run {state['run_id']}",
            field="run_id",
            limit=run_id,
            value=state["run_id"],
        )
    if state["schedule"] != asdict(schedule):
        log.warning("the schedule changed from %s to %s", state["schedule"], asdict(schedule))
    backend.restore_optimizer(folder)
    random_state = base64.b64decode(state["rng"]["torch"])
    torch.set_rng_state(torch.from_numpy(np.frombuffer(random_state, np.uint8).copy()))
