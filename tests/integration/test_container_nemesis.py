"""A short nemesis over containers; `make chaos` plays a longer one."""

from functools import partial

import pytest
from chaos import torment
from container_members import RECOVERY_S
from container_stack import tormented
from nemesis import plan
from scenes import Stage

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]  # images are built

SEED, KILLS, SECONDS = 12, 7, 70


def test_all_is_reconciled_after_whatever_is_done_to_each_member(our_images, tmp_path) -> None:
    with tormented(tmp_path / "work", our_images) as stack:
        planned = partial(plan, SEED, means=stack.means, kills=KILLS, seconds=SECONDS)
        measures = torment(tmp_path, Stage(stack), planned, RECOVERY_S)

    assert [measure.line() for measure in measures if not measure.holds] == []
