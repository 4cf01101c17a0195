"""Fetches payloads from the object store for a parent that does not join Ray itself.

Answers questions on an inherited socket until it closes: `{nodes: {node: {sha256: size}},
timeout_s}` with `{objects: {sha256: [offset, size]}, failed: {node: why}}` and a memory file that
holds the objects. References never leave this process.
"""

import argparse
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import ray as _ray
from ray.exceptions import RayError

from treadle_payloads import ray_wire
from treadle_payloads.ray_cluster import join, owner_of

ray: Any = _ray


class Reader:
    """Asks the owners of a run's nodes."""

    def __init__(self, namespace: str) -> None:
        """`namespace` is that of the run's actors."""
        self._namespace = namespace
        self._owners: dict[str, Any] = {}
        self._lives: dict[str, int] = {}

    def read(
        self, nodes: Mapping[str, Mapping[str, int]], timeout_s: float
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Arrays by sha256, as far as they came in time; and the nodes that did not answer."""
        deadline = time.monotonic() + timeout_s
        failed: dict[str, str] = {}
        asked = {
            node: owner.lend.remote(list(sizes))
            for node, sizes in nodes.items()
            if (owner := self._owner(node)) is not None
        }
        lent: dict[Any, str] = {}
        for node, answer in asked.items():
            try:
                loan = ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
            except RayError as error:
                self._owners.pop(node, None)
                failed[node] = f"{type(error).__name__}: {error}"
                continue
            if loan.life >= self._lives.get(node, 0):
                self._lives[node] = loan.life
                pairs = zip(loan.objects, nodes[node], strict=True)
                lent |= {ref: sha256 for ref, sha256 in pairs if ref is not None}
        return dict(_got(lent, deadline)), failed

    def _owner(self, node: str) -> Any:
        if node not in self._owners:
            owner = owner_of(node, self._namespace)
            if owner is None:
                return None
            self._owners[node] = owner
        return self._owners[node]


def _got(lent: Mapping[Any, str], deadline: float) -> Iterator[tuple[str, Any]]:
    if not lent:
        return
    left_s = max(0.0, deadline - time.monotonic())
    ready, _late = ray.wait(list(lent), num_returns=len(lent), timeout=left_s)
    for ref in ready:
        try:
            yield lent[ref], ray.get(ref, timeout=1.0)
        except RayError:  # its owner is gone, or its memory
            continue


def _answer(connection: socket.socket, reader: Reader, question: Mapping[str, Any]) -> None:
    arrays, failed = reader.read(question["nodes"], question["timeout_s"])
    sizes = {sha256: size for sizes in question["nodes"].values() for sha256, size in sizes.items()}
    whole = {sha256: data for sha256, data in arrays.items() if data.nbytes == sizes[sha256]}
    descriptor = os.memfd_create("treadle-payloads", os.MFD_CLOEXEC)
    try:
        objects: dict[str, list[int]] = {}
        offset = 0
        for sha256, data in whole.items():
            left = memoryview(data)
            objects[sha256] = [offset, len(left)]
            offset += len(left)
            while left:
                left = left[os.write(descriptor, left) :]
        ray_wire.send(connection, {"objects": objects, "failed": failed}, descriptor)
    finally:
        os.close(descriptor)


def main() -> NoReturn:
    """Serves the socket; ends with it."""
    parser = argparse.ArgumentParser(prog="treadle_payloads.ray_reader", description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--socket", type=int, required=True, help="inherited descriptor")
    args = parser.parse_args()
    connection = socket.socket(fileno=args.socket)
    reader = Reader(args.namespace)
    try:
        join(args.address)
        ray_wire.send(connection, {})
        while True:
            question, _ = ray_wire.receive(connection)
            _answer(connection, reader, question)
    except EOFError:
        pass
    except (OSError, RuntimeError, ValueError) as error:  # what Ray raises for an absent cluster
        sys.stderr.write(f"Ray: {error}\n")
    os._exit(0)  # Ray would wait for a head that is gone


if __name__ == "__main__":
    main()
