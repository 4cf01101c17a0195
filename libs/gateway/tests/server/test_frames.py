from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle_agents.record import Generated
from treadle_core.episodes import Segment
from treadle_core.errors import InvalidFieldError, Kind
from treadle_core.tickets import Sampling
from treadle_gateway import records
from treadle_gateway.frames import FRAMING, Say
from treadle_gateway.settings import (
    GatewaySettings,
    Limits,
    settings_from_map,
    settings_to_map,
)
from treadle_gateway.terms import DrainingError, Outcome, SessionSpec


def there_and_back(*fields: Any) -> list[Any]:
    """Fields as they arrive, a byte at a time."""
    unpacker = FRAMING.unpacker()
    frames = [
        frame
        for byte in FRAMING.pack(Say.PIECE, *fields) + FRAMING.pack(Say.DONE)
        for frame in unpacker.feed(bytes([byte]))
    ]
    assert [say for say, _ in frames] == [Say.PIECE, Say.DONE]
    return frames[0][1]


def same(one: Any, other: Any, names: tuple[str, ...]) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        and getattr(one, name).dtype == getattr(other, name).dtype
        for name in names
    )


ARRAYS = ("token_ids", "logprobs", "policy_version", "context_version")


def test_a_piece_arrives_as_it_was() -> None:
    ids = np.array([1, 2**31 - 1], np.int32)
    piece = Generated(ids, np.array([-0.1, -9e9], np.float32), ids, ids, length=True)
    arrived = records.generated_from_list(there_and_back(*records.pieces_to_list([piece])))
    assert same(piece, arrived, ARRAYS)
    assert arrived.length is True


def test_a_segment_arrives_as_it_was() -> None:
    sampled = np.array([False, True])
    versions = np.where(sampled, 3, -1).astype(np.int32)
    ids, logprobs = np.array([5, 6], np.int32), np.array([0, -0.5], np.float32)
    segment = Segment(ids, sampled, sampled, logprobs, versions, versions, temperature=0.7)
    arrived = records.segment_from_list(there_and_back(*records.segment_to_list(segment)))
    assert same(segment, arrived, (*ARRAYS, "sampled", "trained"))
    assert arrived.temperature == 0.7


def test_what_a_session_is_opened_with_arrives_as_it_was() -> None:
    sampling = Sampling(0.5, 9, logit_bias={7: -1.0}, schema={"type": "string"})
    spec = SessionSpec(sampling, 60.0, trainable=False, task={"prompt": ["x", None, 1.5, 10**30]})
    (arrived,) = there_and_back(records.spec_to_map(spec))
    assert records.spec_from_map(arrived) == spec


@pytest.mark.parametrize(
    "outcome", [None, Outcome(expired=True), Outcome(1.0, (0.5, 0.5), {"a": 1.0}, truncated=True)]
)
def test_an_outcome_arrives_as_it_was(outcome: Outcome | None) -> None:
    (arrived,) = there_and_back(records.outcome_to_map(outcome))
    assert records.outcome_from_map(arrived) == outcome


def test_an_error_arrives_with_what_a_client_can_do_about_it() -> None:
    arrived = records.error_from_list(there_and_back(*records.error_to_list(DrainingError())))
    assert (arrived.kind, arrived.retry_after_s) == (Kind.UNAVAILABLE, 5.0)


def test_settings_arrive_without_the_run_token(tmp_path: Path) -> None:
    settings = GatewaySettings(
        tmp_path,
        "policy",
        100,
        tmp_path / "log",
        run_token="secret",  # noqa: S106
        supported=frozenset({"top_p"}),
        limits=Limits(requests=3),
    )
    (arrived,) = there_and_back(settings_to_map(settings))
    assert "secret" not in repr(arrived)
    told, digest = settings_from_map(arrived)
    assert "secret" not in repr(settings)
    assert told == replace(settings, run_token="")
    assert len(digest) == 32


@pytest.mark.parametrize(
    "changed",
    [
        {"host": "0.0.0.0"},  # noqa: S104
        {"host": "192.168.1.1"},
        {"host": "example.com"},
        {"certificate": Path("a.pem")},
    ],
    ids=str,
)
def test_settings_that_would_open_a_gateway_to_a_network_are_refused(changed: Any) -> None:
    base = {"model_folder": Path(), "model_name": "m", "max_context": 9, "log": Path("log")}
    with pytest.raises(InvalidFieldError, match="gateway"):
        GatewaySettings(**base | changed)
    both = {"certificate": Path("a.pem"), "private_key": Path("b.pem")}
    GatewaySettings(**base | changed | both)
    GatewaySettings(**base, host="0.0.0.0", insecure_dev=True)  # noqa: S104


def test_an_outcome_with_a_reward_and_a_reason_against_it_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="no_reward"):
        Outcome(reward=1.0, no_reward="none")
    with pytest.raises(InvalidFieldError, match="reward"):
        Outcome(reward=float("nan"))
