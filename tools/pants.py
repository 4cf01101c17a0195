"""Pants over the distributions that need no torch: list, dependencies, test and package.

usage: python tools/pants.py          proves them, one JSON line a measure
       python tools/pants.py lock     writes the pins that Pants installs, after a change of one
       python tools/pants.py ARG...   runs `pants ARG...`

Pants itself runs on CPython 3.9 (PYTHON39 names one). Where there is none, that is said and nothing
is proven. What Pants would fetch from release pages is made from PyPI packages, in .venv-pants.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path
from xml.etree import ElementTree

from grpc_tools import protoc

from treadle_runtime.measures import Measure, report

ROOT = Path(__file__).parent.parent
ROOM = ROOT / ".venv-pants"
PINS = ROOT / "3rdparty" / "python" / "default.txt"
PEX = "2.1.137"  # what Pants 2.17.1 is made for
TESTS = ["pytest", "pytest-asyncio", "pytest-timeout", "hypothesis", "redis", "nats-py"]
# Plain PyPI: a constraint or an index in the machine's own settings breaks pex's resolves.
PLAIN = {**os.environ, "PIP_CONFIG_FILE": os.devnull}

# protoc with the gRPC generator built in, called as Pants calls protoc with a plugin.
PROTOC = """#!{python}
import sys
from grpc_tools import protoc
args = ["-I{includes}"]
for arg in sys.argv[1:]:
    if not arg.startswith("--plugin=protoc-gen-grpc="):
        args.append(arg.replace("--grpc_out", "--grpc_python_out"))
if not any(arg.startswith("--proto_path") for arg in args):
    args.insert(0, "-I.")
sys.exit(protoc.main(["protoc", *args]))
"""

SETTINGS = """\
[subprocess-environment]
env_vars.add = ["PIP_CONFIG_FILE={null}", "SSL_CERT_FILE"]

[pex-cli]
version = "v{pex}"
url_template = "file:{room}/pex"
known_versions = {pex_known}

[protoc]
version = "grpcio-tools-{protoc}"
url_template = "file:{room}/protoc.zip"
known_versions = {protoc_known}

[grpc-python-plugin]
version = "builtin"
url_template = "file:{room}/grpc_python_plugin"
known_versions = {plugin_known}
"""


def python39() -> Path | None:
    """The first CPython 3.9 that runs: PYTHON39, one on PATH, one of pyenv's."""
    named = [os.environ.get("PYTHON39"), shutil.which("python3.9")]
    candidates = [Path(name) for name in named if name]
    candidates += sorted(Path.home().glob(".pyenv/versions/3.9*/bin/python3.9"))
    for candidate in candidates:
        asked = call(candidate, "--version", check=False)
        if asked.returncode == 0 and asked.stdout.startswith("Python 3.9."):
            return candidate
    return None


def call(*words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a program and returns its output; quietly where it may fail."""
    errors = None if check else subprocess.DEVNULL
    return subprocess.run(  # noqa: S603, all words are ours
        words, check=check, env=PLAIN, stdout=subprocess.PIPE, stderr=errors, text=True
    )


def install(python: Path) -> None:
    """Makes .venv-pants: Pants, and the files that it would fetch, once for each Pants."""
    version = tomllib.loads((ROOT / "pants.toml").read_text())["GLOBAL"]["pants_version"]
    done = ROOM / f"pants-{version}.done"
    if done.exists():
        return
    call(python, "-m", "venv", "--clear", ROOM)
    inside = ROOM / "bin" / "python"
    call(inside, "-m", "pip", "install", "--quiet", f"pantsbuild.pants=={version}", f"pex=={PEX}")
    # A wheel of ours lies in a PEX of its own, beside that of what it requires: each would miss
    # the other.
    mild = ("--python-shebang", "/usr/bin/env python3", "--inject-env", "PEX_IGNORE_ERRORS=1")
    call(inside, "-m", "pex", f"pex=={PEX}", "-c", "pex", "-o", ROOM / "pex", *mild)
    write_stand_ins()
    done.touch()


def write_stand_ins() -> None:
    """Writes protoc, the gRPC plugin and the settings that name them, with their digests."""
    includes = Path(protoc.__file__).parent / "_proto"
    with zipfile.ZipFile(ROOM / "protoc.zip", "w") as archive:
        entry = zipfile.ZipInfo("bin/protoc", (1980, 1, 1, 0, 0, 0))
        entry.external_attr = (stat.S_IFREG | 0o755) << 16
        archive.writestr(entry, PROTOC.format(python=sys.executable, includes=includes))
    (ROOM / "grpc_python_plugin").write_text("#!/bin/sh\nexit 1\n")  # never called
    tools = importlib.metadata.version("grpcio-tools")
    settings = SETTINGS.format(
        null=os.devnull,
        room=ROOM,
        pex=PEX,
        protoc=tools,
        pex_known=known(f"v{PEX}", "pex"),
        protoc_known=known(f"grpcio-tools-{tools}", "protoc.zip"),
        plugin_known=known("builtin", "grpc_python_plugin"),
    )
    (ROOM / "pants.offline.toml").write_text(settings)


def known(version: str, name: str) -> str:
    """The line by which Pants knows a file of .venv-pants: version, platform, digest and size."""
    data = (ROOM / name).read_bytes()
    return f'["{version}|linux_x86_64|{hashlib.sha256(data).hexdigest()}|{len(data)}"]'


def pants(*args: str) -> None:
    """Runs Pants without a daemon, its output on stderr; exits where it fails."""
    files = [str(ROOT / "pants.toml"), str(ROOM / "pants.offline.toml")]
    env = {**os.environ, "PANTS_CONFIG_FILES": json.dumps(files), "PANTS_PANTSD": "false"}
    if "SSL_CERT_FILE" in os.environ:
        env["PANTS_CA_CERTS_PATH"] = os.environ["SSL_CERT_FILE"]
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    ran = subprocess.run(  # noqa: S603, all words are ours
        [ROOM / "bin" / "pants", "--no-dynamic-ui", *args],
        cwd=ROOT,
        env=env,
        stdout=sys.stderr,
        check=False,
    )
    if ran.returncode:
        raise SystemExit(ran.returncode)


def wanted() -> list[str]:
    """Third-party requirements of the torchless distributions, and of their tests."""
    named = set(TESTS)
    for build in sorted(ROOT.glob("*/*/BUILD")):
        project = build.parent / "pyproject.toml"
        if project.exists():
            named.update(tomllib.loads(project.read_text())["project"]["dependencies"])
    return sorted(name for name in named if not name.startswith("treadle-"))


def lock() -> None:
    """Writes every pin that Pants installs, by pip's resolver."""
    resolve = (sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet")
    ran = call(*resolve, "--report", "-", "-c", ROOT / "constraints.txt", *wanted())
    chosen = [item["metadata"] for item in json.loads(ran.stdout)["install"]]
    pins = sorted(f"{item['name']}=={item['version']}" for item in chosen)
    PINS.write_text("\n".join(pins) + "\n")


def stale_pins() -> list[str]:
    """What is wanted and not pinned, or pinned otherwise than in constraints.txt."""
    constraints = pins_of(ROOT / "constraints.txt")
    pins = pins_of(PINS)
    missing = {canonical(re.split(r"[^\w.-]", name, maxsplit=1)[0]) for name in wanted()}
    other = [name for name in pins if constraints.get(name, pins[name]) != pins[name]]
    return sorted(missing - set(pins)) + other


def pins_of(path: Path) -> dict[str, str]:
    """Versions by canonical name."""
    lines = path.read_text(encoding="utf-8").splitlines()
    split = (line.split("==") for line in lines if "==" in line)
    return {canonical(name): version for name, version in split}


def canonical(name: str) -> str:
    """As PyPI compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    """Proves, locks or passes on; 0 where everything holds, or Pants cannot be had."""
    if sys.argv[1:] == ["lock"]:
        lock()
        return 0
    start = time.monotonic()
    python = python39()
    if python is None:
        return skipped("it needs a CPython 3.9, and none is on PATH or in pyenv")
    try:
        install(python)
    except subprocess.CalledProcessError as error:
        return skipped(f"it cannot be installed here: {error}")
    if sys.argv[1:]:
        pants(*sys.argv[1:])
        return 0
    stale = stale_pins()
    if stale:
        raise SystemExit(f"{', '.join(stale)}: pins are old; python tools/pants.py lock")
    shutil.rmtree(ROOM / "dist", ignore_errors=True)
    (ROOM / "dist").mkdir()
    return prove(start)


def skipped(why: str) -> int:
    """Says loudly that nothing was proven, and why."""
    print(f"SKIPPED: Pants: {why}", file=sys.stderr)
    return report([Measure("pants_skipped", 1, "runs")])


def prove(start: float) -> int:
    """Lists, follows, tests and packages everything; prints the measures."""
    listed, followed = ROOM / "dist" / "list.txt", ROOM / "dist" / "dependencies.txt"
    pants(
        *(f"--list-output-file={listed}", f"--dependencies-output-file={followed}"),
        *("list", "dependencies", "test", "package", "::"),
    )
    targets = listed.read_text(encoding="utf-8").split()
    distributions = [target for target in targets if target.endswith(":dist")]
    passed = 0
    for found in (ROOM / "dist" / "test" / "reports").glob("*.xml"):
        for suite in ElementTree.parse(found).iter("testsuite"):  # noqa: S314, Pants wrote it
            passed += int(suite.get("tests", 0)) - int(suite.get("skipped", 0))
    wheels = len(list((ROOM / "dist").glob("*.whl")))
    return report(
        [
            Measure("pants_targets", len(targets), "targets"),
            Measure(
                "pants_dependencies", len(followed.read_text(encoding="utf-8").split()), "targets"
            ),
            Measure("pants_tests_passed", passed, "tests", ">= 1"),
            Measure("pants_packages", wheels, "wheels", f"== {len(distributions)}"),
            Measure("pants_seconds", round(time.monotonic() - start, 1), "s"),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
