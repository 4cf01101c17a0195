"""Form `command`: a command line, as processes of this host."""

import os
from dataclasses import dataclass

from treadle_agents.processes import run_tree
from treadle_rollout.adapters.forms import REWARD_FILE, TASK_FILE, Given, Left, laid_out


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Runs programs in folders of their own. They see the files of this host."""

    async def run(self, given: Given) -> Left:
        """As Form.run."""
        with laid_out(given.task) as folder:
            seen = {
                "PATH": os.environ.get("PATH", os.defpath),
                "HOME": str(folder.aside),
                "LANG": "C.UTF-8",
                "TREADLE_TASK": str(folder.aside / TASK_FILE),
                "TREADLE_REWARD": str(folder.aside / REWARD_FILE),
                **given.environment,
            }
            ended = await run_tree(
                given.words, environment=seen, folder=folder.work, deadline_s=given.deadline_s
            )
            return folder.left(ended, given.answer)
