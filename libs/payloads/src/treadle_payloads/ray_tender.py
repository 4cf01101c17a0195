"""Keeps the owner of one node's payloads alive in Ray, for as long as stdin stays open.

A process of its own, which the sidecar starts again when it ends: what Ray does to its drivers
does not reach the process that holds the payloads. Stdin that ends with END ends the owner too;
else the owner waits for the next tender.
"""

import argparse
import logging
import os
import sys
import threading
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from treadle_payloads.ray_cluster import END, join, owner_name, owner_of
from treadle_payloads.ray_owner import PayloadOwner

TEND_S = 5.0
"""Between two looks at the owner."""

_ANSWER_S = 5.0
_END_S = 10.0
_MOST_MISSES = 2
_log = logging.getLogger(__name__)


def main() -> int:
    """Tends the owner until stdin ends."""
    parser = argparse.ArgumentParser(prog="treadle_payloads.ray_tender", description=__doc__)
    for name in ("address", "namespace", "node", "directory"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--ray-node", default="", help="id of the Ray node; this one's if absent")
    args = parser.parse_args()
    until, words = threading.Event(), bytearray()
    threading.Thread(target=_watch, args=(until, words), daemon=True).start()
    try:
        join(args.address)
        while not until.is_set():
            _tend(_owner(args), args)
            until.wait(TEND_S)
        if bytes(words) == END:
            _end(owner_of(args.node, args.namespace))
    except (OSError, RuntimeError, ValueError, RayError) as error:
        _log.error("Ray at %s: %s", args.address, error)
        return 1
    return 0


def _owner(args: argparse.Namespace) -> Any:
    """The owner's handle; starts it on the Ray node of the spool if there is none."""
    node = args.ray_node or ray.get_runtime_context().get_node_id()
    options: dict[str, Any] = {
        "name": owner_name(args.node),
        "namespace": args.namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    return ray.remote(PayloadOwner).options(**options).remote(args.directory, args.bytes)


def _tend(owner: Any, args: argparse.Namespace) -> None:
    """Ends an owner that does not answer, so that the next look starts another."""
    for _ in range(_MOST_MISSES):
        try:
            ray.get(owner.tend.remote(), timeout=_ANSWER_S)
        except RayError as error:
            _log.warning("owner of %s does not answer: %s", args.node, error)
        else:
            return
    _end(owner)


def _end(owner: Any) -> None:
    if owner is not None:
        ray.kill(owner)


def _watch(until: threading.Event, words: bytearray) -> None:
    words += sys.stdin.buffer.read()
    until.set()
    timer = threading.Timer(_END_S, os._exit, (1,))  # Ray may wait for an absent head
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main())
