"""The worker process by itself, as a program with a socket."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle_rollout.frames import FRAMING, Say
from treadle_runtime.workers.framing import Unpacker

pytestmark = pytest.mark.processes

AGENTS = Path(__file__).parent / "bad_agents.py"
RUNS = "import treadle_rollout.worker as w; w.STALLED_S = 1.0; w.main()"


def test_a_worker_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'grpc', 'opentelemetry'} & set(sys.modules)"
    code = f"import sys, treadle_rollout.worker; sys.exit(str({heavy} or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


@pytest.fixture
def worker(tokenizer: Path) -> Iterator[tuple[socket.socket, subprocess.Popen[str]]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", RUNS, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        theirs.close()
        ours.settimeout(20)
        ours.sendall(FRAMING.pack(Say.START, str(tokenizer), f"{AGENTS}:ChosenLater", "{}", 4))
        yield ours, process
        process.kill()
        process.communicate()


def hear(line: socket.socket, unpacker: Unpacker[Say]) -> list[Any]:
    while data := line.recv(65536):
        if frames := list(unpacker.feed(data)):
            return frames
    return []


def test_a_worker_whose_loop_is_held_says_by_whom_and_ends(worker: Any) -> None:
    line, process = worker
    unpacker = FRAMING.unpacker()
    assert hear(line, unpacker) == [(Say.READY, ["env"])]
    line.sendall(
        FRAMING.pack(Say.PLAY, 0, json.dumps({"prompt": "c", "do": "blocks"}), 64, 8, None)
    )
    assert hear(line, unpacker) == [(Say.EXTEND, [0, b"\x04\0\0\0", [], []])]
    line.sendall(FRAMING.pack(Say.SAMPLED, 0, b"\x01\0\0\0", False))
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert 'bad_agents.py", line' in said
    assert "in blocks" in said


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="end-of-file"),
        pytest.param(b"\xff\xff\xff\xff", id="too-long"),
        pytest.param(b"\x01\0\0\0\xc1", id="no-message"),
    ],
)
def test_a_worker_ends_when_its_replica_is_gone_or_talks_nonsense(worker: Any, sent: bytes) -> None:
    line, process = worker
    assert hear(line, FRAMING.unpacker()) == [(Say.READY, ["env"])]
    line.sendall(sent)
    line.shutdown(socket.SHUT_WR)
    process.communicate(timeout=20)
    assert process.returncode is not None
