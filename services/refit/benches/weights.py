"""Versions that the bench moves: some tensors of one size, and versions that change a share."""

import socket
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_weights.digests import hex_digest
from treadle_weights.layouts import Layout, whole
from treadle_weights.plan import plan
from treadle_weights.transport import Arena, LoadOrder


def layout_of(count: int, elements: int) -> Layout:
    """`count` bfloat16 tensors of `elements`."""
    return whole({f"layers.{i}.weight": ("bfloat16", (elements // 64, 64)) for i in range(count)})


def tensors_of(layout: Layout, bits: NDArray[np.uint16]) -> list[tuple[str, NDArray[Any]]]:
    """The tensors, one after the other in `bits`."""
    found: list[tuple[str, NDArray[Any]]] = []
    at = 0
    for rectangle in layout.rectangles:
        end = at + rectangle.num_elements
        found.append((rectangle.tensor, bits[at:end].reshape(rectangle.shape)))
        at = end
    return found


def changed(bits: NDArray[np.uint16], share: float, seed: int) -> NDArray[np.uint16]:
    """The same with a share of the elements, about, of another value."""
    rng = np.random.default_rng(seed)
    return bits ^ (rng.random(bits.size, np.float32) < share).astype(np.uint16)


def order_of(path: str, layout: Layout, version: int, digests: dict[str, str]) -> LoadOrder:
    """The order to load a version in the layout in which it is sent."""
    stated = {name: int(digest, 16) for name, digest in digests.items()}
    return LoadOrder(version, Arena(path, layout.size()), layout, plan(layout, layout), stated)


def hexed(digests: dict[str, int]) -> dict[str, str]:
    return {name: hex_digest(digest) for name, digest in digests.items()}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
