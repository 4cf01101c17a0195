"""A run whose agent always fails, as a user sees it."""

from pathlib import Path

import pytest
from e2e_harness import RECIPE, SMALL, measures, treadle

pytestmark = pytest.mark.e2e

AGENT = """
from treadle_agents import Env, Result, Turn


class Broken(Env):
    def step(self, turn: Turn) -> Result:
        raise RuntimeError("the tool is not there")
"""


def test_a_run_whose_agent_always_fails_ends_with_the_reason_and_loses_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    agent = f"rollout.agent={{name: '{tmp_path / 'agent.py'}:Broken'}}"

    told = treadle("train", RECIPE, f"run.dir={tmp_path / 'run'}", *SMALL, agent, status=1)

    assert "the tool is not there" in told.stderr
    counts = measures(treadle("fsck", str(tmp_path / "run")).stdout)
    assert (counts["trained_step"], counts["acknowledged"], counts["lost"]) == (0, 0, 0)
