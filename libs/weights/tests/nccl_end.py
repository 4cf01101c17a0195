"""One end of a transfer over NCCL, on a GPU of its own: nccl_end.py send|receive PORT."""

import sys
import time

import numpy as np

from treadle_weights.gloo import Gloo
from treadle_weights.layouts import whole
from treadle_weights.plan import plan
from treadle_weights.transport import ArenaMissingError, LoadOrder

LAYOUT = whole({f"t{i}": ("float32", (1024, 257)) for i in range(8)})


def main(end: str, port: int) -> None:
    transport = Gloo(port, backend="nccl", bucket_bytes=1 << 20)
    tensors = {
        name: np.random.default_rng(i).random((1024, 257), np.float32)
        for i, name in enumerate(LAYOUT.by_tensor)
    }
    arena = transport.arena("run", 1, LAYOUT.size())
    if end == "send":
        sender = transport.sender("run")
        sender.send(arena, LAYOUT, tensors.items())
        print("sent", flush=True)  # noqa: T201
        sys.stdin.readline()
        sender.close()
        return
    digests = {name: int(text, 16) for name, text in (w.split("=") for w in sys.argv[3:])}
    order = LoadOrder(1, arena, LAYOUT, plan(LAYOUT, LAYOUT), digests)
    receiver, buffer = transport.receiver(), np.zeros(LAYOUT.size(), np.uint8)
    for _ in range(2):
        receipt = receiver.receive(order, LAYOUT, buffer)
        print(receipt.launches, receipt.epoch, flush=True)  # noqa: T201
    sys.stdin.readline()  # the sender is killed
    began_at = time.monotonic()
    try:
        receiver.receive(order, LAYOUT, buffer)
    except ArenaMissingError:
        print("gone", time.monotonic() - began_at, flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
