"""Payloads through the object stores of two Ray nodes: always the right bytes, or none in time."""

import os
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from ray_nodes import Cluster, Node, joined, two_nodes, until
from sidecar_process import PATIENCE_S, RUN, running

from treadle_payloads import ray_cache
from treadle_payloads.ray_cache import RayCache
from treadle_payloads.ray_cluster import RayConfig
from treadle_payloads.store import PayloadReference

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: NOT TESTED"),
]

DEADLINE_S = 2.0
SLACK_S = 1.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with two_nodes() as cluster:
        yield cluster


@pytest.fixture
def node(cluster: Cluster, tmp_path: Path) -> Iterator[Node]:
    node = Node(cluster, tmp_path, f"unix:{tmp_path}/node")
    node.put(*(os.urandom(1 << 20) for _ in range(4)))
    node.start()
    yield node
    node.stop()


@pytest.fixture
def cache(node: Node) -> Iterator[RayCache]:
    cache = RayCache(node.config)
    yield cache
    cache.close()


def contents(node: Node) -> dict[str, bytes]:
    return {
        ref.sha256: (node.directory / ref.sha256[:2] / ref.sha256).read_bytes()
        for ref in node.references
    }


def timed(cache: RayCache, references: list[PayloadReference]) -> dict[str, memoryview]:
    start = time.monotonic()
    got = cache.get_many(references, DEADLINE_S)
    assert time.monotonic() - start < DEADLINE_S + SLACK_S
    return got


def test_a_reader_on_another_node_gets_the_bytes_of_a_batch_and_nothing_else(
    node: Node, cache: RayCache
) -> None:
    unknown = PayloadReference("0" * 64, 4, node.name, 1)
    stranger = PayloadReference("1" * 64, 4, "unix:/nobody", 1)
    joined(cache, node.references)

    got = timed(cache, [unknown, stranger, *node.references])

    assert got == contents(node)
    assert all(view.readonly for view in got.values())


def test_bytes_that_are_not_those_of_the_reference_are_absent(node: Node, cache: RayCache) -> None:
    right, wrong, short = node.references[:3]
    for reference, size in ((wrong, wrong.size), (short, 1)):
        path = node.directory / reference.sha256[:2] / reference.sha256
        path.write_bytes(os.urandom(size))

    got = joined(cache, [right, wrong, short])

    assert list(got) == [right.sha256]


def test_an_owner_that_stands_still_costs_the_deadline_once(node: Node, cache: RayCache) -> None:
    joined(cache, node.references)
    _, process = node.owner()

    os.kill(process, signal.SIGSTOP)
    try:
        assert timed(cache, node.references) == {}
        before = time.monotonic()
        assert cache.get_many(node.references, DEADLINE_S) == {}
        assert time.monotonic() - before < DEADLINE_S / 4
    finally:
        os.kill(process, signal.SIGCONT)


def test_an_owner_that_was_killed_lives_again_and_its_readers_go_on(
    node: Node, cache: RayCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cache, "PAUSE_S", 0.5)
    kept = joined(cache, node.references)
    life, process = node.owner()

    os.kill(process, signal.SIGKILL)
    timed(cache, node.references)

    assert until(lambda: cache.get_many(node.references, DEADLINE_S)) == contents(node) == kept
    assert node.owner()[0] > life


def test_what_is_dropped_and_deleted_leaves_no_memory_behind(
    cluster: Cluster, node: Node, cache: RayCache
) -> None:
    got = joined(cache, node.references)
    everything = sum(ref.size for ref in node.references)
    assert until(lambda: cluster.used_bytes() >= everything)

    for reference in node.references:
        (node.directory / reference.sha256[:2] / reference.sha256).unlink()

    assert until(lambda: cluster.used_bytes() == 0)
    assert sum(map(len, got.values())) == everything


def test_an_owner_keeps_no_more_than_its_budget(
    cluster: Cluster, node: Node, cache: RayCache
) -> None:
    budget = node.config.bytes
    batches = [node.put(*(os.urandom(8 << 20) for _ in range(5))) for _ in range(3)]
    joined(cache, node.references[:1])

    for batch in batches:
        assert len(timed(cache, batch)) == len(batch)

    assert len(timed(cache, node.references)) < len(node.references)
    assert until(lambda: cluster.used_bytes() <= 2 * budget)


def test_an_owner_ends_with_its_sidecar(cluster: Cluster, node: Node, cache: RayCache) -> None:
    joined(cache, node.references)
    _, process = node.owner()

    node.stop()

    assert until(lambda: not Path(f"/proc/{process}").exists())
    assert timed(cache, node.references) == {}


def test_who_reads_outlives_the_raylets_and_the_head(tmp_path: Path) -> None:
    with two_nodes() as cluster:
        node = Node(cluster, tmp_path, f"unix:{tmp_path}/node")
        node.put(os.urandom(1 << 20))
        node.start()
        cache = RayCache(node.config)
        got = joined(cache, node.references)

        cluster.signal("second", signal.SIGKILL)
        timed(cache, node.references)
        new = node.put(os.urandom(1 << 20))
        cluster.signal("head", signal.SIGSTOP)
        assert timed(cache, new) == {}
        cluster.signal("head", signal.SIGKILL)
        cluster.signal("gcs", signal.SIGKILL)
        assert timed(cache, new) == {}

        assert got.items() <= contents(node).items()
        cache.close()
        node.stop()


def test_a_batch_of_another_node_comes_through_ray_and_without_it_by_the_stream(
    cluster: Cluster, tmp_path: Path
) -> None:
    ray = {"address": cluster.address, "bytes": 16 << 20}
    data = os.urandom(1 << 20)
    with running(tmp_path, ray=ray) as sidecar:
        reference = sidecar.store().put(data)
        far = sidecar.store(far=True, ray=ray)
        assert far.get(reference) == data, "by the stream, while Ray is joined"
        _, process = until(lambda: cluster.owner(RUN, sidecar.node))
        through_ray = RayCache(RayConfig.of(ray, RUN))
        joined(through_ray, [reference])

        sidecar.kill()
        assert until(lambda: far.fetch([reference], timeout_s=3.0)[reference.sha256] == data)
        os.kill(process, signal.SIGSTOP)
        sidecar.start()
        assert far.get(reference) == data, "by the stream, once Ray is late"

        os.kill(process, signal.SIGCONT)
        through_ray.close()
        sidecar.signal(signal.SIGTERM)
        sidecar.process.wait(PATIENCE_S)
        assert until(lambda: not Path(f"/proc/{process}").exists())


def test_a_sidecar_serves_without_the_cluster_that_it_is_told_of(tmp_path: Path) -> None:
    ray = {"address": "127.0.0.1:9", "bytes": 16 << 20}
    with running(tmp_path, ray=ray) as sidecar:
        reference = sidecar.store().put(b"x" * 100_000)

        assert sidecar.store(far=True, ray=ray).get(reference) == b"x" * 100_000
