"""A public proxy before the engine of the bench, as its own command line starts it.

    PYTHON proxies.py litellm|lightning ENGINE_URL

PYTHON is that of the environment that has the proxy. Says on one line of JSON where it is and which
process serves; then opens and ends sessions as it is told, line by line. README.md beside this file
says what it needs.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

MODEL = "policy"
KEY = "sk-" + secrets.token_hex(24)
START_S = 120.0


def main(kind: str, engine: str) -> None:
    """Serves until stdin ends."""
    with tempfile.TemporaryDirectory(prefix="treadle-peer-") as folder:
        proxy = KINDS[kind](Path(folder), engine)
        try:
            proxy.wait()
            say({"port": proxy.port, "worker": proxy.process.pid})
            for line in sys.stdin:
                order = json.loads(line)
                say(proxy.open(order["open"]) if "open" in order else None)
        finally:
            proxy.process.terminate()
            proxy.process.wait(20)


def say(value: Any) -> None:
    """A line to whoever started this process."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


class Proxy:
    """A proxy in a process of its own, at a port that was free."""

    health = ""

    def __init__(self, folder: Path, engine: str) -> None:
        """Starts it in a folder of its own."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.engine = engine
        told = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | self.environment()
        self.process = subprocess.Popen(  # noqa: S603, what the caller names
            self.command(folder),
            cwd=folder,
            env={**os.environ, **told},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            stderr=sys.stderr,
        )

    def command(self, folder: Path) -> list[str]:
        """How it is started."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """What it is told besides."""
        return {}

    def open(self, count: int) -> list[list[str]]:
        """So many sessions: name, token, and where each is."""
        raise NotImplementedError

    def url(self, path: str) -> str:
        """Of a path of it."""
        return f"http://127.0.0.1:{self.port}{path}"

    def wait(self) -> None:
        """Until it answers. Raises RuntimeError where it ended, or does not in time."""
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up and self.process.poll() is None:
            try:
                with urllib.request.urlopen(self.url(self.health), timeout=2):  # noqa: S310, loopback
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError(f"{type(self).__name__} does not answer; status {self.process.poll()}")


class LiteLlm(Proxy):
    """LiteLLM's proxy with one worker and no data base: it captures nothing."""

    health = "/health/liveliness"

    def command(self, folder: Path) -> list[str]:
        parameters = {"model": f"openai/{MODEL}", "api_base": self.engine, "api_key": "x"}
        told = {
            "model_list": [{"model_name": MODEL, "litellm_params": parameters}],
            "litellm_settings": {"telemetry": False},
        }
        path = folder / "litellm.yaml"
        path.write_text(json.dumps(told), encoding="utf-8")
        program = str(Path(sys.executable).with_name("litellm"))
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--num_workers", "1"]
        return [program, "--config", str(path), *options]

    def environment(self) -> dict[str, str]:
        return {
            "LITELLM_MASTER_KEY": KEY,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_LOCAL_POLICY_TEMPLATES": "true",
            "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "true",
            "LITELLM_TELEMETRY": "False",
            "LITELLM_LOG": "ERROR",
            "NO_DOCS": "True",
        }

    def open(self, count: int) -> list[list[str]]:
        return [["", KEY, self.url("/v1")]] * count


class Lightning(Proxy):
    """Agent Lightning's server: a rollout a session, whose requests it keeps as text."""

    health = "/healthz"

    def command(self, folder: Path) -> list[str]:
        words = [f"port={self.port}", "key=", f"default_proxy.model_name={MODEL}"]
        options = ["host=127.0.0.1", *words, f"hydra.run.dir={folder}"]
        return [sys.executable, "-m", "agentlightning.server", *options]

    def wait(self) -> None:
        super().wait()
        self._post("/api/models", [{"model": MODEL, "endpoint": self.engine}])

    def open(self, count: int) -> list[list[str]]:
        names = [secrets.token_hex(8) for _ in range(count)]
        self._post("/api/rollouts", [{"input": {}, "rollout_id": name} for name in names])
        path = "/proxy/rollout/{}/attempt/0/mode/train/openai/v1"
        return [[name, KEY, self.url(path.format(name))] for name in names]

    def _post(self, path: str, body: Any) -> None:
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url(path), data, headers)  # noqa: S310, loopback
        with urllib.request.urlopen(request, timeout=30):  # noqa: S310
            pass


KINDS = {"litellm": LiteLlm, "lightning": Lightning}

if __name__ == "__main__":
    main(*sys.argv[1:])
