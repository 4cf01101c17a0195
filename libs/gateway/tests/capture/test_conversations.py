"""Random conversations, against a model that is simple enough to be right."""

import pytest
from conversations import Play
from fuzz_gateway import play, refuse
from hypothesis import given, settings
from hypothesis import strategies as st

FEW = 32
"""Sessions, every fourth with a template; `make fuzz-gateway` plays thousands."""
WRONG = 200
"""Requests."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("policies")


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_capture_does_what_the_model_does(seed):
    Play(seed).play()


def test_so_it_does_behind_real_wires_and_templates(folder):
    tally = play(folder, 0, FEW)
    assert tally.wrong == []
    assert tally.played == FEW
    seen = {"joined", "replayed", "branches", "paths.compaction", "untrained.undelivered"}
    assert seen <= tally.counts.keys()


def test_a_request_that_is_wrong_is_refused_whatever_it_is(folder):
    tally = refuse(folder, 0, WRONG)
    assert tally.wrong == []
