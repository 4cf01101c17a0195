"""What a reader on another node waits for a batch: through Ray, and by the sidecar's streams.

One sidecar, and two Ray nodes on this machine: the owner of the payloads lives on one, the reader
joins the other. Both ways end in verified bytes, and take turns on batches of fresh payloads; the
second time a batch is read through Ray, as by another rank of the reader's node, it is in the
reader's object store already. Needs ray.

    python libs/payloads/benches/far.py --rounds 5
"""

import argparse
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fetch import fetched

from treadle_payloads.ray_cache import RayCache
from treadle_payloads.ray_cluster import RayConfig, child_environment
from treadle_payloads.ray_sidecar import command
from treadle_payloads.store import PayloadReference
from treadle_payloads.testing import SidecarProcess
from treadle_runtime.measures import Measure, report

PATIENCE_S = 60.0
WAYS = ("stream", "ray", "ray_again")
_NODES = """
import json, sys
from ray.cluster_utils import Cluster
options = {"num_cpus": 1, "object_store_memory": int(sys.argv[1]), "node_ip_address": "127.0.0.1"}
first = options | {"include_dashboard": False, "temp_dir": sys.argv[2]}
cluster = Cluster(initialize_head=True, head_node_args=first)
try:
    second = cluster.add_node(**options)
    print(json.dumps([cluster.address, second.node_id]), flush=True)
    sys.stdin.read()
finally:
    cluster.shutdown()
"""


def child(stack: ExitStack, arguments: list[str]) -> "subprocess.Popen[str]":
    """A process that ends with its stdin, which it does with the stack."""
    process = subprocess.Popen(  # noqa: S603, our own code
        arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=dict(child_environment("127.0.0.1:1")),
    )
    stack.callback(process.communicate)
    return process


def joined(cache: RayCache, batch: list[PayloadReference]) -> RayCache:
    """The cache once it has all of a batch."""
    give_up = time.monotonic() + PATIENCE_S
    while len(cache.get_many(batch, 5.0)) < len(batch):
        if time.monotonic() > give_up:
            raise TimeoutError("the owner of the payloads did not come up")
        time.sleep(0.1)
    return cache


def measures(args: argparse.Namespace) -> Iterator[Measure]:
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ |= {"RAY_worker_niceness": "0"}
    total = args.payloads * args.size
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="treadle-far-"))
        node = SidecarProcess(Path(directory)).start()
        stack.callback(node.stop)
        nodes: Any = child(
            stack, [sys.executable, "-c", _NODES, str(3 * total), f"{directory}/ray"]
        )
        address, second = json.loads(nodes.stdout.readline())
        config = RayConfig(address=address, namespace=node.run_id, bytes=2 * total)
        spool = node.directory / "payloads"
        child(stack, command(config, node.name, spool, ray_node=second))
        near, far, source = node.store(), node.store(far=True), random.Random(1)  # noqa: S311
        cache = RayCache(config)
        stack.callback(cache.close)
        wall: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(args.rounds + 1):
            batch = [near.put(source.randbytes(args.size)) for _ in range(args.payloads)]
            if not number:  # warms the stores and the channels
                joined(cache, batch)
            for way in WAYS if number % 2 else ("ray", "ray_again", "stream"):
                start = time.perf_counter()
                got = fetched(far, batch) if way == "stream" else cache.get_many(batch, PATIENCE_S)
                if number:
                    wall[way].append(round(time.perf_counter() - start, 3))
                if len(got) != len(batch):
                    raise LookupError(f"{way}: {len(got)} of {len(batch)} payloads came")
                del got
        load = {"seconds": wall, "load": round(os.getloadavg()[0], 1)}
        median = {way: statistics.median(values) for way, values in wall.items()}
        for way in ("ray", "ray_again"):
            ratio = median[way] / median["stream"]
            yield Measure(f"{way}_over_stream", ratio, "ratio", details=load)


def main() -> int:
    """Prints the measures."""
    parser = argparse.ArgumentParser(description="Fetching payloads of another node")
    parser.add_argument("--payloads", type=int, default=32, help="of one batch")
    parser.add_argument("--size", type=int, default=4_000_000, help="bytes of a payload")
    parser.add_argument("--rounds", type=int, default=5)
    return report(measures(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
