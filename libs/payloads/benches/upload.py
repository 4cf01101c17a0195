"""What it costs to make a payload durable, by a sidecar and without one.

Starts a sidecar, and puts the same amount of bytes through it, through `files`, and as plain
writes with an fsync each, in turns; LANES threads put at once. What was put is read back by a
stream and compared. Prints one JSON object a measure.

    python libs/payloads/benches/upload.py --size 1000000 --count 64
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import yaml

from treadle_payloads.files import FileStore
from treadle_payloads.sidecar_store import SidecarStore
from treadle_payloads.store import PayloadStoreAwayError
from treadle_runtime.measures import Measure, report

LANES = 8
RUN = "benchmark"
_START_S = 30.0

Put = Callable[[bytes], object]


def main() -> int:
    """Prints the measures; exit status 1 where what was read is not what was put."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1_000_000, help="bytes of a payload")
    parser.add_argument("--count", type=int, default=64, help="payloads of a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="where to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="treadle-upload-", dir=args.directory) as parent:
        directory = Path(parent)
        sidecar = _started(directory)
        try:
            return report(_measured(directory, sidecar, args))
        finally:
            sidecar.terminate()
            sidecar.wait()


def _measured(
    directory: Path, sidecar: "subprocess.Popen[bytes]", args: argparse.Namespace
) -> list[Measure]:
    store, far = _store(directory, "payloads"), _store(directory, "elsewhere")
    files, plain = FileStore(directory / "files"), directory / "plain"
    plain.mkdir()
    arms: dict[str, Put] = {
        "sidecar": lambda data: store.put(data, holder="e"),
        "files": files.put,
        "plain": lambda data: _write(plain / os.urandom(8).hex(), data),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    cpu: list[float] = []
    differing, last = 0, [b""]
    for _ in range(args.turns):
        for name, put in arms.items():
            last = [os.urandom(args.size) for _ in range(args.count)]
            before = _cpu_s(sidecar.pid)
            seconds[name].append(_timed(put, last))
            if name == "sidecar":
                cpu.append(_cpu_s(sidecar.pid) - before)
                references = [store.put(data, holder="e") for data in last]
                fetched = far.fetch(references)
                differing += sum(
                    fetched[reference.sha256] != data
                    for reference, data in zip(references, last, strict=True)
                )
    again_s = _timed(arms["sidecar"], [os.urandom(args.size)] * args.count)
    megabytes = args.size * args.count / 1e6
    rates = {name: megabytes / median(each) for name, each in seconds.items()}
    return [
        Measure("upload_sidecar", round(rates["sidecar"]), "MB/s"),
        Measure("upload_files", round(rates["files"]), "MB/s"),
        Measure("upload_plain", round(rates["plain"]), "MB/s"),
        Measure("upload_over_plain", round(rates["sidecar"] / rates["plain"], 2), "ratio"),
        Measure("upload_again", round(args.count / again_s), "payloads/s"),
        Measure("sidecar_cpu", round(1e3 * median(cpu) / megabytes, 2), "ms/MB"),
        Measure("sidecar_rss", round(_rss_mb(sidecar.pid)), "MB"),
        Measure("client_rss", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "MB"),
        Measure("differing", differing, "payloads", "== 0"),
    ]


def _started(directory: Path) -> "subprocess.Popen[bytes]":
    """Starts a sidecar and waits until it takes uploads."""
    config = directory / "payloads.yaml"
    run = {"id": RUN, "dir": str(directory), "model": str(directory)}
    settings = {"run": run, "listen": f"unix:{directory}/node", "upload": f"{directory}/upload"}
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    command = (sys.executable, "-m", "treadle_payloads.sidecar", "--config", str(config))
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)  # noqa: S603
    give_up = time.monotonic() + _START_S
    while True:
        try:
            _store(directory, "payloads").put(b"", holder="e")
        except PayloadStoreAwayError:
            if process.poll() is not None or time.monotonic() > give_up:
                raise
            time.sleep(0.05)
        else:
            return process


def _store(directory: Path, spool: str) -> SidecarStore:
    return SidecarStore(
        upload=f"{directory}/upload",
        node=f"unix:{directory}/node",
        directory=directory / spool,
        run_id=RUN,
    )


def _timed(put: Put, contents: Sequence[bytes]) -> float:
    with ThreadPoolExecutor(LANES) as threads:
        began = time.perf_counter()
        list(threads.map(put, contents))
        return time.perf_counter() - began


def _write(path: Path, data: bytes) -> None:
    with path.open("wb", 0) as file:
        file.write(data)
        os.fsync(file.fileno())


def _cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mb(pid: int) -> float:
    """The most that the process has had resident."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    (peak,) = (line for line in lines if line.startswith("VmHWM"))
    return int(peak.split()[1]) / 1024


if __name__ == "__main__":
    sys.exit(main())
