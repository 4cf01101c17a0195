"""A run whose payloads lie with a sidecar, which dies in the middle of it."""

import os
import signal

import pytest

pytestmark = pytest.mark.e2e


def test_a_run_goes_on_when_its_sidecar_is_killed(make_run) -> None:
    run = make_run("run.inline_bytes=0", "run.payloads={name: sidecar}")
    run.start()
    run.wait_until(lambda: any(row["objects"] for row in run.rows("payloads", "payloads")))

    os.kill(run.service_pids()["payloads"], signal.SIGKILL)
    run.finish()

    deaths = [row["service"] for row in run.rows("supervisor", "death")]
    assert deaths.count("payloads") == 1
    run.fsck()
