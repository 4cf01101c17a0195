"""A writer of checkpoints that dies at every one of its moments."""

import pytest
from ledger_model import checkpoints

pytestmark = pytest.mark.processes


def test_a_folder_with_a_checkpoints_name_is_whole_at_every_moment():
    moments = checkpoints.survive(checkpoints.write_next, checkpoints.check_named)

    assert moments > 10


def test_latest_names_a_whole_checkpoint_at_every_moment():
    moments = checkpoints.survive(checkpoints.finish_next, checkpoints.check_retained)

    assert moments > 10
