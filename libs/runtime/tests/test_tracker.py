import contextlib
import json
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from treadle_runtime.config import RunConfig
from treadle_runtime.tracker import JsonlTracker, of_service


@contextlib.contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Writes that would make a file of this process larger than `size` bytes find no room."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_row_without_room_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    JsonlTracker(Path("/dev/full")).log("counts", {"position": 1})

    assert "no room for a row of numbers: counts" in caplog.text


def test_half_a_row_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tracker = JsonlTracker(path)
    tracker.log("counts", {"position": 1})
    with no_file_beyond(path.stat().st_size + 10):
        tracker.log("counts", {"position": 2})
        tracker.log("counts", {"position": 3})
    tracker.log("counts", {"position": 4})

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["position"] for row in rows] == [1, 4]


def run_of(directory: Path, *trackers: str) -> RunConfig:
    names = [{"name": name} for name in trackers]
    return RunConfig.model_validate(
        {"id": "run", "dir": directory, "model": "policy", "trackers": names}
    )


def scalars(directory: Path) -> list[tuple[str, int, float]]:
    """(tag, step, value) of everything in the event files of a directory."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    arrays = pytest.importorskip("tensorboard.util.tensor_util")
    return [
        (value.tag, event.step, arrays.make_ndarray(value.tensor).item())
        for path in sorted(directory.iterdir())
        for event in loader.EventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]


def test_event_files_hold_the_numbers_of_the_rows_at_their_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = of_service(run_of(tmp_path, "tensorboard"), "trainer")

    tracker.log("step", {"step": 7, "reward": 0.5, "weights_digest": "ab"})
    tracker.log("evaluation", {"evaluation": "greedy", "step": 8, "score": 0.75})
    tracker.log("rollout", {"served_version": 3, "tokens_per_s": float("nan")})

    assert scalars(tmp_path / "tensorboard" / "trainer") == [
        ("step/reward", 7, 0.5),
        ("evaluation/greedy/score", 8, 0.75),
        ("rollout/served_version", 3, 3.0),
    ]
    lines = (tmp_path / "metrics" / "trainer.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["step", "evaluation", "rollout"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_event_files_that_find_no_room_end_and_the_service_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    tracker = of_service(run_of(tmp_path, "tensorboard"), "trainer")

    with no_file_beyond(0):
        tracker.log("step", {"step": 1, "reward": 0.5})
        tracker.log("step", {"step": 2, "reward": 0.5})

    assert caplog.text.count("no more numbers for TensorBoard") == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("tensorbord", "did you mean tensorboard", id="unknown"),
        pytest.param("tensorboard", "pip install 'treadle-runtime[tensorboard]'", id="missing"),
    ],
)
def test_a_tracker_that_cannot_be_had_is_a_wrong_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name, said
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    monkeypatch.delitem(sys.modules, "treadle_runtime.tensorboard", raising=False)

    with pytest.raises(ValidationError, match=r"trackers\.0") as caught:
        run_of(tmp_path, name)

    assert said in str(caught.value)
