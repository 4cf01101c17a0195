"""A run whose versions are broadcasts over communicators."""

import json
import socket

import pytest
from e2e_harness import treadle

pytestmark = pytest.mark.e2e

SECTIONS = ("trainer", "refit", "rollout")
PARTS = {"announce", "gather", "wire", "load", "verify", "pause"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_run_goes_by_gloo_and_says_where_the_time_of_a_version_went(make_run) -> None:
    chosen = f"transport={{name: gloo, port: {free_port()}, bucket_bytes: 65536}}"
    run = make_run(*(f"{section}.{chosen}" for section in SECTIONS))
    run.start()
    run.finish()

    committed = {row["version"]: row for row in run.rows("refit", "version")}
    served = [row for row in run.rows("rollout", "version") if not row["aliased"]]
    assert served
    for row in served:
        assert row["version"] in committed
        assert 0 < row["wire_s"] <= row["load_s"]
        assert row["launches"] <= row["wire_bytes"] / 65536 + 1
    assert len({row["group_epoch"] for row in served}) == 1
    assert any(row["members"] for row in committed.values())
    shown = json.loads(treadle("refit", "show", str(run.directory), "--json").stdout)
    assert set(shown["seconds"]) == PARTS
    assert shown["transport"] == "gloo"
    assert shown["plan"]["bytes"] == served[0]["bytes"]
    run.fsck()
