"""Weights in motion: how fast, at what pause, and what happens to the fleet when a member ends.

Prints one JSON object a measure, and ends with 1 where one misses its goal. Arms that are compared
run in turn in one process; every transfer is verified by its digests.

    python services/refit/benches/refit.py --only dead_peer_s,hung_peer_s
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import Iterator

from fleet import KILL, STOP, dead, mixed, pause
from wires import deltas, wire

from treadle_runtime.measures import Measure, report


def measures(args: argparse.Namespace) -> Iterator[Measure]:
    """Those that are asked for, as they come."""
    only = set(args.only.split(",")) if args.only else None

    def wanted(*names: str) -> bool:
        return only is None or bool(only & set(names))

    if wanted("gloo_over_raw_broadcast", "launches_over_buckets"):
        yield from wire(args.mib, args.repeats)
    if wanted("delta_bytes_ratio", "choice_over_better_arm"):
        yield from deltas(args.mib // 8, args.slow, args.repeats)
    if wanted("pause_over_refit"):
        yield asyncio.run(pause(args.repeats))
    if wanted("dead_peer_s"):
        yield asyncio.run(dead("dead_peer_s", KILL, 30))
    if wanted("hung_peer_s"):
        yield asyncio.run(dead("hung_peer_s", STOP, 45))
    if wanted("mixed_version_responses"):
        yield asyncio.run(mixed(args.responses))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of a version")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slow", type=float, default=125e6 / 2, help="bytes/s of the slow link")
    parser.add_argument("--responses", type=int, default=10_000)
    parser.add_argument("--only", default="", help="measures, by comma; left out: all")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    return report(measures(args))


if __name__ == "__main__":
    sys.exit(main())
