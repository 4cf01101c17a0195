"""A container engine and images, also on a machine that reaches no registry.

usage: python tools/containers.py start      an engine, where none is there; prints what to export
       python tools/containers.py images     our images, one JSON line a measure
       python tools/containers.py stop       ends the engine that `start` started
"""

import subprocess
import sys
import time

import container_engine as engine
import container_images as images

from treadle_runtime.measures import Measure, report

_MOST_MB = {
    **dict.fromkeys(("experience", "refit", "payloads"), "<= 400"),
    **dict.fromkeys(("rollout", "trainer"), "<= 1300"),
}
"""Half of it, or a seventh where there is torch, is Python on Debian."""


def start() -> int:
    """Prints the environment of an engine, for `eval`."""
    for name, value in (engine.find() or engine.start()).items():
        print(f"export {name}={value}")
    return 0


def stop() -> int:
    """Says whether there was anything to end."""
    print("stopped" if engine.stop() else "no engine of ours runs")
    return 0


def make() -> int:
    """Builds all images; an engine that is started for that is ended after it."""
    began = time.monotonic()
    with engine.running() as client:
        for name, origin in images.provide(client, *images.PUBLIC).items():
            sys.stderr.write(f"{name}: {origin}\n")
        images.build(client, *images.OURS, revision=revision())
        sizes = {
            service: client.images.get(images.name_of(service)).attrs["Size"]
            for service in images.OURS
        }
    measures = [
        Measure(f"image_{service}", round(size / 1e6), "MB", _MOST_MB[service])
        for service, size in sizes.items()
    ]
    return report([*measures, Measure("images_s", round(time.monotonic() - began, 1), "s")])


def revision() -> str:
    """The commit of the working tree, for the images' labels."""
    asked = ["git", "-C", str(images.ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    chosen = {"start": start, "stop": stop, "images": make}.get(" ".join(sys.argv[1:]))
    if chosen is None:
        sys.exit(__doc__)
    try:
        sys.exit(chosen())
    except (engine.NoEngineError, images.NoImageError) as error:
        sys.exit(str(error))
