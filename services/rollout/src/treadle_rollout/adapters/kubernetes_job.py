"""Form `job`: a program in a Kubernetes Job, made of a template, watched and deleted.

The cluster ends what we do not: a Job has its deadline as its own, and goes soon after its end.
"""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import aiohttp
import yaml

from treadle_agents.failures import EpisodeError
from treadle_agents.processes import Cut, Ended
from treadle_agents.processes.regardless import regardless
from treadle_agents.processes.tree import MAX_OUTPUT
from treadle_core.episodes import FailureClass
from treadle_core.errors import InvalidFieldError
from treadle_rollout.adapters.forms import Given, Left, failed, files_of
from treadle_rollout.adapters.job_template import (
    REWARD_PATH,
    TASK_FILE,
    TASK_PLACE,
    Filling,
    checked,
    filled,
    secret,
)
from treadle_rollout.adapters.owners import OWNER, is_left_over, labels
from treadle_runtime.config import Config

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds whom it acts as."""
ANSWER_S = 30.0
"""Most seconds that the cluster may take for an answer."""
_HOPELESS = {"ErrImageNeverPull", "ImagePullBackOff", "InvalidImageName"}
"""What a container waits for in vain."""
_INSIDE = {"KUBERNETES_SERVICE_HOST": "kubernetes.default.svc", "KUBERNETES_SERVICE_PORT": "443"}
"""Where a pod finds its cluster; a worker does not see the variables that say so."""


class ClusterTerms(Config):
    """Where Jobs run."""

    kubeconfig: Path | None = None
    """None: the account of the pod that we run in, else `~/.kube/config`."""
    context: str | None = None
    """Of the kubeconfig; None: its current one."""
    namespace: str = ""
    """Empty: the template's, else `default`."""


class KubernetesJob:
    """Runs programs as Jobs of a cluster."""

    def __init__(self, template: Path, image: str, terms: ClusterTerms) -> None:
        """Reads the template, asks the cluster, and removes left-overs, once in a process.

        Call it in a thread without an event loop. Raises InvalidFieldError with the key of the
        recipe where there is no template or no cluster.
        """
        try:
            said = yaml.safe_load(template.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise InvalidFieldError("agent.job", limit="a YAML file", value=error) from error
        self._template = checked(said, "agent.job")
        meta: dict[str, Any] = self._template.get("metadata") or {}
        self._space = terms.namespace or str(meta.get("namespace") or "default")
        self._image = image
        self._terms = terms
        _prepared(terms.kubeconfig, terms.context, self._space)

    async def run(self, given: Given) -> Left:
        """As Form.run. The answer of the program is what it prints, errors included."""
        if files_of(given.task):
            raise TypeError("task.files: expected none with a job; its program reads TREADLE_TASK")
        filling, values = self._filling(given)
        started = time.monotonic()
        async with _client(self._terms) as client:
            try:
                async with asyncio.timeout(given.deadline_s):
                    await self._start(client, filling, values)
                    pod = await self._ended(client, filling.name)
                status = _status(pod)
                output = await self._output(client, pod)
            except TimeoutError:
                seconds = time.monotonic() - started
                return Left(Ended(137, b"", b"", seconds, Cut.DEADLINE), "", "")
            except _failures() as error:
                raise _refused(error, time.monotonic() - started) from error
            finally:
                await regardless(self._remove(client, filling.name))
        cut = None if status.get("reason") != "OOMKilled" else Cut.MEMORY
        ended = Ended(status["exit_code"], output, b"", time.monotonic() - started, cut)
        return Left(ended, status.get("message") or "", "")

    def _filling(self, given: Given) -> tuple[Filling, dict[str, str]]:
        variables = {
            "TREADLE_TASK": f"{TASK_PLACE}/{TASK_FILE}",
            "TREADLE_REWARD": REWARD_PATH,
            **given.environment,
        }
        filling = Filling(
            name=f"treadle-{uuid.uuid4().hex}",
            labels=labels(given.session, given.deadline_s),
            image=self._image,
            words=given.words,
            variables=tuple(variables),
            deadline_s=given.deadline_s,
        )
        return filling, {**variables, TASK_FILE: json.dumps(dict(given.task))}

    async def _start(self, client: Any, filling: Filling, values: dict[str, str]) -> None:
        """The Job first: its secret is to go with it. The pod waits for the secret."""
        job = filled(self._template, filling)
        made = await _batch(client).create_namespaced_job(self._space, job)
        body = secret(filling, made.metadata.uid, values)
        await _core(client).create_namespaced_secret(self._space, body)

    async def _ended(self, client: Any, name: str) -> dict[str, Any]:
        """The pod, once its container has ended."""
        watch: Any = import_module("kubernetes_asyncio.watch")
        while True:  # a watch ends when the server likes
            async with watch.Watch() as events:
                stream = events.stream(
                    _core(client).list_namespaced_pod,
                    self._space,
                    label_selector=f"job-name={name}",
                    timeout_seconds=int(ANSWER_S),
                )
                async for event in stream:
                    pod = cast("dict[str, Any]", event["object"].to_dict())
                    if _is_over(pod):
                        return pod
                    if event["type"] == "DELETED":
                        raise _gone(pod)

    async def _output(self, client: Any, pod: dict[str, Any]) -> bytes:
        said = await _core(client).read_namespaced_pod_log(
            pod["metadata"]["name"],
            self._space,
            container=_status_of(pod)["name"],
            limit_bytes=MAX_OUTPUT,
        )
        return str(said).encode()

    async def _remove(self, client: Any, name: str) -> None:
        try:
            await _delete(client, self._space, name)
        except _failures():
            return  # the cluster ends it at its deadline, and forgets it


@cache
def _prepared(kubeconfig: Path | None, context: str | None, space: str) -> None:
    """Checks that the cluster answers, and sweeps it; a failure is not remembered."""
    try:
        asyncio.run(_sweep(ClusterTerms(kubeconfig=kubeconfig, context=context), space))
    except (OSError, aiohttp.ClientError, TimeoutError) as error:
        raise InvalidFieldError("agent.cluster", limit="one that answers", value=error) from error


async def _sweep(terms: ClusterTerms, space: str) -> None:
    """Deletes Jobs whose worker was killed."""
    async with _client(terms) as client, asyncio.timeout(ANSWER_S):
        try:
            jobs = await _batch(client).list_namespaced_job(space, label_selector=OWNER)
            for job in jobs.items:
                if is_left_over(job.metadata.labels):
                    await _delete(client, space, job.metadata.name)
        except _api_error() as error:
            limit = f"one that lets us list and delete Jobs of {space}"
            raise InvalidFieldError("agent.cluster", limit=limit, value=error.reason) from error


async def _delete(client: Any, space: str, name: str) -> None:
    try:
        await _batch(client).delete_namespaced_job(
            name, space, propagation_policy="Background", _request_timeout=ANSWER_S
        )
    except _api_error() as error:
        if error.status != 404:
            raise


@contextlib.asynccontextmanager
async def _client(terms: ClusterTerms) -> AsyncGenerator[Any]:
    """A client of the cluster. Raises InvalidFieldError where none is named."""
    try:
        api: Any = import_module("kubernetes_asyncio.client")
        config: Any = import_module("kubernetes_asyncio.config")
        inside: Any = import_module("kubernetes_asyncio.config.incluster_config")
    except ModuleNotFoundError as error:
        limit = "the package kubernetes_asyncio (treadle-rollout[kubernetes])"
        raise InvalidFieldError("agent.job", limit=limit, value="not installed") from error
    settings, file = api.Configuration(), _kubeconfig(terms)
    try:
        if file is None:
            account = [str(ACCOUNT / name) for name in ("token", "ca.crt")]
            inside.InClusterConfigLoader(*account, environ=_INSIDE).load_and_set(settings)
        else:
            await config.load_kube_config(str(file), terms.context, settings)
    except (config.ConfigException, OSError) as error:
        limit = "a kubeconfig, or an account of the pod that we run in"
        raise InvalidFieldError("agent.cluster", limit=limit, value=error) from error
    async with api.ApiClient(settings) as client:
        yield client


def _kubeconfig(terms: ClusterTerms) -> Path | None:
    """None: the account of our pod."""
    if terms.kubeconfig is None and ACCOUNT.is_dir():
        return None
    return terms.kubeconfig or Path.home() / ".kube" / "config"


def _batch(client: Any) -> Any:
    return import_module("kubernetes_asyncio.client").BatchV1Api(client)


def _core(client: Any) -> Any:
    return import_module("kubernetes_asyncio.client").CoreV1Api(client)


def _api_error() -> Any:
    return import_module("kubernetes_asyncio.client").ApiException


def _failures() -> tuple[type[BaseException], ...]:
    """What an order to the cluster may raise."""
    return (_api_error(), aiohttp.ClientError, OSError)


def _refused(error: BaseException, seconds: float) -> BaseException:
    """A Job that the cluster finds wrong is the recipe's fault, and all else its own."""
    wrong = getattr(error, "status", 0) in (400, 422)
    whose = FailureClass.ENVIRONMENT if wrong else FailureClass.INFRASTRUCTURE
    told = str(getattr(error, "body", "") or error).encode()
    return failed("the cluster did not run its Job", Ended(1, b"", told, seconds), whose)


def _status_of(pod: dict[str, Any]) -> dict[str, Any]:
    """Of the agent's container, by the order in which they were told; empty before it has one."""
    first = pod["spec"]["containers"][0]["name"]
    told = cast("list[dict[str, Any]]", pod["status"].get("container_statuses") or [])
    found = [status for status in told if status["name"] == first]
    return found[0] if found else {}


def _is_over(pod: dict[str, Any]) -> bool:
    """Whether the agent's container has ended. Raises EpisodeError where it never starts."""
    state = cast("dict[str, Any]", _status_of(pod).get("state") or {})
    if waiting := cast("dict[str, Any] | None", state.get("waiting")):
        if waiting.get("reason") in _HOPELESS:
            what = f"its container waits: {waiting['reason']}"
            raise failed(what, Ended(1, b"", b"", 0.0), FailureClass.INFRASTRUCTURE)
        return False
    if pod["status"].get("phase") == "Failed" and not state.get("terminated"):
        raise _gone(pod)
    return bool(state.get("terminated"))


def _gone(pod: dict[str, Any]) -> EpisodeError:
    """A pod that the cluster took away."""
    what = f"its pod was ended: {pod['status'].get('reason') or 'deleted'}"
    return failed(what, Ended(1, b"", b"", 0.0), FailureClass.INFRASTRUCTURE)


def _status(pod: dict[str, Any]) -> dict[str, Any]:
    return _status_of(pod)["state"]["terminated"]
