"""A run whose versions are files."""

import pytest

pytestmark = pytest.mark.e2e

SECTIONS = ("trainer", "refit", "rollout")


def test_a_run_goes_by_files_and_keeps_the_newest_two_versions(make_run) -> None:
    run = make_run(*(f"{section}.transport.name=files" for section in SECTIONS))
    run.start()
    run.finish()

    committed = [row["version"] for row in run.rows("refit", "version")]
    kept = {int(path.name.split(".")[1]) for path in run.directory.glob("versions/*.safetensors")}
    assert kept == set(committed[-2:])
    for row in run.rows("refit", "version"):
        parts = [row[f"{part}_s"] for part in ("open", "fill", "verify", "commit")]
        assert all(part >= 0 for part in parts)
        assert abs(sum(parts) - row["total_s"]) < 0.01
    served = [row["version"] for row in run.rows("rollout", "version")]
    assert served
    assert set(served) <= set(committed)
    run.fsck()
