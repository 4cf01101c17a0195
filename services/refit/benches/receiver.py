"""The other end of the bench's wires, as a process: does what it is told, a JSON object a line.

`raw` takes plain broadcasts, `load` a version; both answer with their seconds.
"""

import json
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from weights import layout_of, order_of

from treadle_weights.gloo import Gloo
from treadle_weights.groups import Group
from treadle_weights.receiving import Receiver
from treadle_weights.torch_groups import communicators


def main() -> None:
    receivers: dict[int, Receiver] = {}
    groups: dict[str, Group] = {}
    buffers: dict[tuple[int, int], NDArray[np.uint8]] = {}
    for line in sys.stdin:
        told: dict[str, Any] = json.loads(line)
        if told["do"] == "raw":
            answer = raw(told, groups, buffers)
        else:
            port, tensors = told["port"], told["tensors"]
            settings: dict[str, Any] = told["settings"]
            receiver = receivers.setdefault(port, Gloo(port, **settings).receiver())
            layout = layout_of(*tensors)
            key = (port, layout.size())
            buffer = buffers.setdefault(key, np.zeros(layout.size(), np.uint8))
            order = order_of(told["path"], layout, told["version"], told["digests"])
            receipt = receiver.receive(order, layout, buffer)
            answer = {
                "seconds": receipt.wire_s + receipt.load_s,
                "verify_s": receipt.verify_s,
                "wire_bytes": receipt.wire_bytes,
                "launches": receipt.launches,
                "encoding": receipt.encoding,
                "epoch": receipt.epoch,
            }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def raw(
    told: dict[str, Any],
    groups: dict[str, Group],
    buffers: dict[tuple[int, int], NDArray[np.uint8]],
) -> dict[str, Any]:
    """One broadcast of `size` bytes in the group `name`, which is formed where it is not there."""
    name, size = told["name"], told["size"]
    if name not in groups:
        joined = communicators("gloo", form_s=30.0, stall_s=60.0).join(
            "127.0.0.1", told["port"], "127.0.0.1"
        )
        groups[name] = joined.form(name, 1, 2)
        buffers[0, size] = np.zeros(size, np.uint8)
    began_at = time.monotonic()
    groups[name].broadcast(buffers[0, size]).wait()
    return {"seconds": time.monotonic() - began_at}


if __name__ == "__main__":
    main()
