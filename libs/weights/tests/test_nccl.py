"""The transport `gloo` with its backend nccl: two processes with a GPU each."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from treadle_weights.digests import hex_digest, tensor_digest
from treadle_weights.layouts import whole

pytestmark = [pytest.mark.gpu, pytest.mark.processes]

PROGRAM = str(Path(__file__).with_name("nccl_end.py"))
LAYOUT = whole({f"t{i}": ("float32", (1024, 257)) for i in range(8)})


def tensor_of(index: int) -> np.ndarray:
    """As the sender has it."""
    return np.random.default_rng(index).random((1024, 257), np.float32)


def start(device: int, *words: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(device), "NCCL_NVLS_ENABLE": "0"}
    command = [sys.executable, PROGRAM, *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def test_a_version_arrives_over_nccl_and_a_dead_sender_is_said() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    digests = [
        f"{name}={hex_digest(tensor_digest(tensor_of(i), LAYOUT.rectangles[i]))}"
        for i, name in enumerate(LAYOUT.by_tensor)
    ]
    sender = start(0, "send", port)
    receiver = None
    try:
        assert sender.stdout.readline() == "sent\n"
        receiver = start(1, "receive", port, *digests)
        buckets = -(-LAYOUT.size() // (1 << 20))
        assert [receiver.stdout.readline().split() for _ in range(2)] == [[str(buckets), "1"]] * 2
        sender.kill()
        sender.wait(20)
        receiver.stdin.write("\n")
        receiver.stdin.flush()
        said, seconds = receiver.stdout.readline().split()
        assert said == "gone"
        assert float(seconds) < 30
    finally:
        for process in (sender, receiver):
            if process is not None:
                process.kill()
                process.communicate()
