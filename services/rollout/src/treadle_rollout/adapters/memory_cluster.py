"""A Kubernetes cluster that forgets everything, for trying the form `job` without one.

It answers the few calls of the official API that the form makes, checks what an API server would
refuse, and plays controller and node: a Job's pod is a process of this host. No scheduler, no other
controllers, no isolation.
"""

import asyncio
import json
import re
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from treadle_agents.processes import run_tree

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_JOBS = "/apis/batch/v1/namespaces/{space}/jobs"
_CORE = "/api/v1/namespaces/{space}"


@dataclass(slots=True, eq=False)
class _Pod:
    """One pod: what is told of it, and the process that it is."""

    said: dict[str, Any]
    task: "asyncio.Task[None]"
    log: bytes = b""


@dataclass(slots=True)
class MemoryCluster:
    """Serve `app()`; `jobs` and `secrets` are what there is, by name, in its one namespace."""

    images: Mapping[str, Sequence[str]]
    """What an image's own program is on this host; an image that is not here cannot be pulled."""
    token: str
    """What callers have to show."""
    namespace: str = "default"
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    secrets: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    _pods: dict[str, _Pod] = field(default_factory=dict[str, _Pod])
    _change: asyncio.Condition = field(default_factory=asyncio.Condition)

    def app(self) -> web.Application:
        """The API."""
        app = web.Application(middlewares=[self._checked])
        app.router.add_post(_JOBS, self._create_job)
        app.router.add_get(_JOBS, self._list_jobs)
        app.router.add_delete(f"{_JOBS}/{{name}}", self._delete_job)
        app.router.add_post(f"{_CORE}/secrets", self._create_secret)
        app.router.add_get(f"{_CORE}/pods", self._list_pods)
        app.router.add_get(f"{_CORE}/pods/{{name}}/log", self._log)
        return app

    @web.middleware
    async def _checked(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return _refusal(401, "Unauthorized", "Unauthorized")
        if request.match_info.get("space") != self.namespace:
            return _refusal(403, "Forbidden", "no such namespace for you")
        return await handler(request)

    async def _create_job(self, request: web.Request) -> web.Response:
        job = await request.json()
        wrong = _unfit(job["metadata"]) or _unfit_pod(job["spec"]["template"]["spec"])
        if wrong:
            return _refusal(422, "Invalid", wrong)
        name = job["metadata"]["name"]
        if name in self.jobs:
            return _refusal(409, "AlreadyExists", name)
        job["metadata"]["uid"] = str(uuid.uuid4())
        self.add(job)
        return web.json_response(job, status=201)

    async def _list_jobs(self, request: web.Request) -> web.Response:
        found = [job for job in self.jobs.values() if _selected(request, job["metadata"])]
        return web.json_response({"kind": "JobList", "metadata": {}, "items": found})

    async def _delete_job(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        job = self.jobs.pop(name, None)
        if job is None:
            return _refusal(404, "NotFound", name)
        pod = self._pods.pop(name)
        pod.task.cancel()
        await asyncio.wait({pod.task})
        uid = job["metadata"]["uid"]
        for key, secret in [*self.secrets.items()]:  # what the Job owns goes with it
            owners = secret["metadata"].get("ownerReferences", [])
            if any(owner["uid"] == uid for owner in owners):
                del self.secrets[key]
        await self._changed()
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _create_secret(self, request: web.Request) -> web.Response:
        secret = await request.json()
        if wrong := _unfit(secret["metadata"]):
            return _refusal(422, "Invalid", wrong)
        self.secrets[secret["metadata"]["name"]] = secret
        await self._changed()
        return web.json_response(secret, status=201)

    async def _list_pods(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch", "").lower() != "true":
            pods = [p.said for p in self._pods.values() if _selected(request, p.said["metadata"])]
            return web.json_response({"kind": "PodList", "metadata": {}, "items": pods})
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        told: dict[str, str] = {}
        async with asyncio.timeout(float(request.query.get("timeoutSeconds", "60"))) as time:
            while not time.expired():
                for event in self._news(request, told):
                    await response.write(json.dumps(event).encode() + b"\n")
                async with self._change:
                    await self._change.wait()
        return response

    def _news(self, request: web.Request, told: dict[str, str]) -> list[dict[str, Any]]:
        """Events of pods that differ from what was told; notes them as told."""
        there = {
            name: json.dumps(pod.said)
            for name, pod in self._pods.items()
            if _selected(request, pod.said["metadata"])
        }
        news = [
            {"type": "MODIFIED" if name in told else "ADDED", "object": json.loads(said)}
            for name, said in there.items()
            if told.get(name) != said
        ]
        news += [
            {"type": "DELETED", "object": json.loads(said)}
            for name, said in told.items()
            if name not in there
        ]
        told.clear()
        told.update(there)
        return news

    async def _log(self, request: web.Request) -> web.Response:
        for pod in self._pods.values():
            if pod.said["metadata"]["name"] == request.match_info["name"]:
                most = int(request.query.get("limitBytes", "1000000"))
                return web.Response(body=pod.log[:most], content_type="text/plain")
        return _refusal(404, "NotFound", request.match_info["name"])

    def add(self, job: dict[str, Any]) -> None:
        """Has a Job there, and starts its pod."""
        name, template = job["metadata"]["name"], job["spec"]["template"]
        self.jobs[name] = job
        labels = {**template["metadata"].get("labels", {}), "job-name": name}
        meta = {"name": f"{name}-0", "labels": labels}
        said = {"kind": "Pod", "metadata": meta, "spec": template["spec"], "status": {}}
        task = asyncio.create_task(self._live(name, said, job["spec"]["activeDeadlineSeconds"]))
        self._pods[name] = _Pod(said, task)

    async def _live(self, name: str, pod: dict[str, Any], deadline_s: float) -> None:
        """A pod's life, as far as its first container."""
        agent = pod["spec"]["containers"][0]
        program = self.images.get(agent["image"])
        if program is None:
            await self._state(pod, agent, "Pending", {"waiting": {"reason": "ImagePullBackOff"}})
            return
        await self._state(pod, agent, "Pending", {"waiting": {"reason": "ContainerCreating"}})
        await self.until(lambda: name in self.secrets)
        secret = self.secrets[name]
        await self._state(pod, agent, "Running", {"running": {}})
        with tempfile.TemporaryDirectory(prefix="treadle-pod-") as folder:
            work = Path(folder)
            ended = await run_tree(
                [*program, *agent.get("args", [])],
                environment=_environment(agent, secret, work),
                folder=work,
                deadline_s=deadline_s,
            )
            ends = work / "termination-log"
            message = ends.read_text()[:4096] if ends.is_file() else ""
        self._pods[name].log = ended.output + ended.errors
        if ended.cut is not None:  # as the controller does, which leaves no pod
            del self._pods[name]
            await self._changed()
            return
        terminated: dict[str, Any] = {"exitCode": ended.status, "message": message}
        terminated["reason"] = "Completed" if ended.ok else "Error"
        phase = "Succeeded" if ended.ok else "Failed"
        await self._state(pod, agent, phase, {"terminated": terminated})

    async def _state(
        self, pod: dict[str, Any], agent: dict[str, Any], phase: str, state: dict[str, Any]
    ) -> None:
        told = {"name": agent["name"], "state": state, "ready": "running" in state}
        told |= {"image": agent["image"], "imageID": "", "restartCount": 0}
        pod["status"] = {"phase": phase, "containerStatuses": [told]}
        await self._changed()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until something of the cluster holds."""
        async with self._change:
            await self._change.wait_for(holds)

    async def _changed(self) -> None:
        async with self._change:
            self._change.notify_all()


def _environment(agent: dict[str, Any], secret: dict[str, Any], work: Path) -> dict[str, str]:
    """What the container's process sees; its paths are those of this host."""
    values: dict[str, str] = secret["stringData"]
    places = {agent["terminationMessagePath"]: str(work / "termination-log")}
    for mount in agent["volumeMounts"]:
        places[mount["mountPath"]] = str(work)
    (work / "task.json").write_text(values["task.json"])
    seen: dict[str, str] = {"PATH": "/usr/bin:/bin"}
    for variable in agent["env"]:
        source = variable.get("valueFrom", {}).get("secretKeyRef")
        value = values[source["key"]] if source else variable["value"]
        for place, here in places.items():
            if value == place or value.startswith(f"{place}/"):
                value = here + value.removeprefix(place)
        seen[variable["name"]] = value
    return seen


def _selected(request: web.Request, meta: dict[str, Any]) -> bool:
    """Whether the labels are those of the request's selector: names, or `name=value`."""
    labels = meta.get("labels", {})
    for term in filter(None, request.query.get("labelSelector", "").split(",")):
        name, equal, value = term.partition("=")
        if name not in labels or (equal and labels[name] != value):
            return False
    return True


def _unfit(meta: dict[str, Any]) -> str:
    """Why an API server refuses a name or a label; empty where it does not."""
    if not _NAME.fullmatch(meta.get("name", "")):
        return f"metadata.name: Invalid value: {meta.get('name')!r}"
    wrong = [value for value in meta.get("labels", {}).values() if not _LABEL.fullmatch(value)]
    return f"metadata.labels: Invalid value: {wrong[0]!r}" if wrong else ""


def _unfit_pod(pod: dict[str, Any]) -> str:
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        return "spec.template.spec.restartPolicy: Required value"
    names = [each.get("name", "") for each in pod["containers"]]
    wrong = [name for name in names if not _NAME.fullmatch(name)]
    if wrong or not all(each.get("image") for each in pod["containers"]):
        return "spec.template.spec.containers: expected a name and an image"
    return ""


def _refusal(status: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "reason": reason, "code": status}
    return web.json_response({**body, "message": message}, status=status, reason=reason)
