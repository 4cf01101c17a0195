"""Planted faults: one changed line of code under test, in this process only.

A model that finds none of them proves nothing.
"""

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """A module whose text reads `after` where it reads `before`."""

    name: str
    module: str
    before: str
    after: str
    is_rare: bool = False
    """Found only after many seeds: left to `make model-tests`."""

    def plant(self) -> None:
        """Loads the module with the fault; raises LookupError where it has no such line.

        Comes before all other imports of it.
        """
        if self.module in sys.modules:
            raise LookupError(f"{self.module} is loaded already")
        spec = importlib.util.find_spec(self.module)
        if spec is None or spec.origin is None:
            raise LookupError(f"no module {self.module}")
        source = Path(spec.origin).read_text()
        if source.count(self.before) != 1:
            raise LookupError(f"{self.name}: {self.module} does not read\n{self.before}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        changed = compile(source.replace(self.before, self.after), spec.origin, "exec")
        exec(changed, module.__dict__)  # noqa: S102
        parent, _, name = self.module.rpartition(".")
        setattr(importlib.import_module(parent), name, module)


CORE = "treadle_experience.core"

LEDGER = (
    Mutant(
        "ack_before_flush",
        "treadle_experience.keeper",
        "        if position > self._durable:\n",
        "        if position < 0:\n",
    ),
    Mutant(
        "skipped_fence_of_trainers",
        f"{CORE}.run",
        "    if trainer_epoch != state.trainer_epoch:\n",
        "    if trainer_epoch < 0:\n",
    ),
    Mutant(
        "skipped_fence_of_attempts",
        f"{CORE}.results",
        "    if not is_held(state, replica_id, attempt):\n",
        "    if episode.state.value != 'issued':\n",
    ),
    Mutant(
        "skipped_fence_of_writers",
        "treadle_experience.adapters.memory",
        "        if writer_epoch != self._writer_epoch:\n",
        "        if writer_epoch < 0:\n",
    ),
    Mutant(
        "uncounted_place",
        f"{CORE}.admission",
        "    return through[-1] - through[known]\n",
        "    return 0\n",
    ),
    Mutant(
        "partial_group",
        f"{CORE}.groups",
        "    elif live:\n",
        "    elif live > 1:\n",
    ),
    Mutant(
        "no_baseline",
        f"{CORE}.admission",
        "    return any(key.step == 0 for key in state.unfinished)\n",
        "    return False\n",
    ),
    Mutant(
        "unfiltered",
        f"{CORE}.groups",
        "    elif reason := drop_reason(run, task):\n",
        "    elif reason := '':\n",
    ),
    Mutant(
        "early_release",
        f"{CORE}.checkpoints",
        "    groups.release(run, _members(state, released, state.released_step))\n",
        "    groups.release(run, _members(state, covered, step))\n",
    ),
    Mutant(
        "steps_not_moved_down",
        f"{CORE}.apply",
        "            state.tasks[task_id].step = later - 1\n",
        "            pass\n",
        is_rare=True,
    ),
    Mutant(
        "skipped_fence_of_condensations",
        "treadle_experience.adapters.memory",
        "        self._check(writer_epoch)\n        later",
        "        later",
    ),
    Mutant(
        "condensed_without_the_last",
        "treadle_experience.keeper",
        "        self._ledger.condense(head, self._durable, self._epoch)\n",
        "        self._ledger.condense(head, self._durable - 1, self._epoch)\n",
    ),
    Mutant(
        "forgotten_too_early",
        f"{CORE}.retention",
        "    return task.step <= step and ",
        "    return task.step <= state.trained_step and ",
    ),
    Mutant(
        "shared_medium_released",
        "treadle_experience.custody",
        "            replace(hold, shared=hold.reference.sha256 not in going)\n",
        "            replace(hold, shared=False)\n",
    ),
    Mutant(
        "forgotten_uncounted",
        f"{CORE}.forgetting",
        "        state.forgotten_results[task.state] += len(task.members())\n",
        "        pass\n",
    ),
)
"""Found by schedules of the experience service."""

CHECKPOINTS = (
    Mutant(
        "non_atomic_rename",
        "treadle_trainer.adapters.folders",
        "            folder.rename(target)\n        except",
        "            shutil.copytree(folder, target)\n        except",
    ),
)
"""Found by a writer of checkpoints that dies."""

FAULTS = {
    each.name: (each.name,)
    for each in (*LEDGER, *CHECKPOINTS)
    if not each.name.startswith("skipped_fence")
} | {"skipped_fence": tuple(each.name for each in LEDGER if each.name.startswith("skipped_fence"))}
"""The kinds of fault, each with the mutants that have to be found for it."""
