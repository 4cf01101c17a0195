"""A run whose policy is shown pictures: they lie beside its episodes, whoever dies."""

import os
import signal

import pytest
from e2e_harness import measures, treadle

from treadle_core.media import check_media
from treadle_experience.episodes_ledger import payloads_of, read_episodes, read_segments
from treadle_payloads.media import fetch_media

pytestmark = pytest.mark.e2e

STEPS = 8
KILLED = ("rollout", "payloads", "experience", "trainer")


def test_no_picture_is_lost_or_stored_twice_when_services_are_killed(make_run, tmp_path) -> None:
    run = make_run(
        f"experience.steps={STEPS}",
        "experience.retries=50",
        "experience.lease_s=3",
        "experience.keep_payloads=true",
        "run.payloads={name: sidecar}",
        recipe="examples/pictures/recipe.yaml",
    )
    run.start()
    for step, service in enumerate(KILLED, 1):
        run.wait_until(lambda: len(run.rows("trainer", "step")) >= step)  # noqa: B023, at once
        os.kill(run.service_pids()[service], signal.SIGKILL)
    run.finish()

    deaths = {row["service"] for row in run.rows("supervisor", "death")}
    assert deaths >= set(KILLED)
    assert run.fsck()["lost"] == 0
    store = payloads_of(run.directory)
    done = [record for record in read_episodes(run.directory) if record.result]
    pictures = {medium.sha256 for record in done for medium in record.result.media}
    assert len(done) == STEPS * 3 * 4
    assert 0 < len(pictures) < len(done)  # a group shows the same
    for record in done:
        segments = read_segments(record, store)
        check_media(record.result.media, [segment.media for segment in segments])
        found = fetch_media(record.result.media, store)
        assert all(isinstance(data, bytes | memoryview) for data in found.values())
    exported = measures(treadle("export", str(run.directory), str(tmp_path / "out")).stdout)
    assert (exported["exported_steps"], exported["missing_steps"]) == (STEPS, 0)
