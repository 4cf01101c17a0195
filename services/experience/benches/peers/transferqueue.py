"""TransferQueue 0.1.11 as an arm: a process of its own environment, told what to do by lines.

Answers each line `{"batches": N, "window": N, "blob": bool}` with `{"samples": N, "wall_s": S,
"cpu_s": S}`. One process puts, another gets, checks and clears. Nothing of it is durable.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from samples import COUNT, Batch, Source, cpu_seconds

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "TQ_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}
POLL_S = 0.005
"""Its blocking fetch sleeps 5 s on a miss, so the client polls."""
STORE_BYTES = 1 << 30


def library(name: str) -> Any:
    """Of the peer's environment."""
    return importlib.import_module(name)


def open_client(address: str, directory: str = "") -> Any:
    """A client of the queue in the cluster at `address`, or in a new one with its `directory`."""
    ray, queue = library("ray"), library("transfer_queue")
    quiet = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "peers"}
    if address:
        ray.init(address=address, **quiet)
        queue.init()
    else:
        own: dict[str, Any] = {
            "num_cpus": 5,
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
        }
        own["_temp_dir"] = directory
        ray.init(object_store_memory=STORE_BYTES, **own, **quiet)
        queue.init(library("omegaconf").OmegaConf.create({"controller": {"polling_mode": True}}))
    return queue.get_client()


def put(client: Any, batch: Batch) -> None:
    torch, stack = library("torch"), library("tensordict.tensorclass").NonTensorStack
    fields = {"meta": stack(*batch.metas), "tokens": torch.from_numpy(batch.tokens)}
    if batch.blobs is not None:
        fields["blobs"] = torch.from_numpy(batch.blobs)
    table = library("tensordict").TensorDict(fields, batch_size=[COUNT])
    client.put(table, partition_id="peers")


def get(client: Any, *, blob: bool) -> Batch:
    fields = ["meta", "tokens", *(["blobs"] if blob else [])]
    wanted = {"data_fields": fields, "batch_size": COUNT, "partition_id": "peers"}
    while not (found := client.get_meta(mode="fetch", task_name="train", **wanted)).size:
        time.sleep(POLL_S)
    table = client.get_data(found)
    batch = Batch(list(table["meta"].tolist()), array(table["tokens"]))
    batch.blobs = array(table["blobs"]) if blob else None
    client.clear_samples(found)
    return batch


def array(tensor: Any) -> Any:
    if tensor.is_nested:
        tensor = library("torch").stack(list(tensor.unbind()))
    return tensor.contiguous().numpy()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def consume(address: str) -> None:
    """The process that gets; says a number a batch."""
    client = open_client(address)
    say("ready")
    for line in sys.stdin:
        order = json.loads(line)
        for _ in range(order["batches"]):
            numbers = get(client, blob=order["blob"]).numbers()
            say(str(numbers[0]))


def main() -> None:
    """Serves lines until stdin ends."""
    with tempfile.TemporaryDirectory(prefix="treadle-ray-", ignore_cleanup_errors=True) as logs:
        serve(open_client("", logs))


def serve(client: Any) -> None:
    """One process puts, and one that it starts gets."""
    address = library("ray").get_runtime_context().gcs_address
    consumer = subprocess.Popen(  # noqa: S603, this file
        [sys.executable, __file__, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    says: Any = consumer.stdout
    says.readline()
    say("ready")
    first = 0
    sources = {blob: Source(blob=blob) for blob in (False, True)}
    for line in sys.stdin:
        order = json.loads(line)
        source = sources[order["blob"]]
        before, start = cpu_seconds(os.getpid()), time.perf_counter()
        batches = pass_through(client, consumer, order, source, first)
        first += batches
        wall_s, cpu_s = time.perf_counter() - start, cpu_seconds(os.getpid()) - before
        say(json.dumps({"samples": batches * COUNT, "wall_s": wall_s, "cpu_s": cpu_s}))
    consumer.communicate()
    library("transfer_queue").close()
    library("ray").shutdown()


def pass_through(
    client: Any, consumer: Any, order: dict[str, Any], source: Source, first: int
) -> int:
    """Puts the batches of an order, from number `first` on, until all were got; how many."""
    batches: int = order["batches"]
    room = threading.Semaphore(order["window"])
    got: list[int] = []

    def listen() -> None:
        for _ in range(batches):
            got.append(int(consumer.stdout.readline()))
            room.release()

    consumer.stdin.write(json.dumps(order) + "\n")
    consumer.stdin.flush()
    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    for number in range(first, first + batches):
        room.acquire()
        put(client, source.batch(number))
    listening.join(120)
    if sorted(got) != [number * COUNT for number in range(first, first + batches)]:
        raise SystemExit(f"batches were lost, or came twice: {got}")
    return batches


if __name__ == "__main__":
    if len(sys.argv) > 1:
        consume(sys.argv[1])
    else:
        main()
