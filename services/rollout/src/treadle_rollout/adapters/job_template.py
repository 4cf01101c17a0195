"""A Kubernetes Job of one episode, made from a template; values in, values out."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from treadle_core.errors import InvalidFieldError

TASK_PLACE = "/treadle"
"""Where the pod finds `task.json`."""
TASK_FILE = "task.json"
REWARD_PATH = "/dev/termination-log"
"""What a container writes there, Kubernetes tells with its end; 4,096 bytes at most."""
KEPT_S = 120
"""Seconds that the cluster keeps a Job that ended, where nobody removes it."""
_VOLUME = "treadle-task"


@dataclass(frozen=True, slots=True)
class Filling:
    """What a template does not say."""

    name: str
    """Of the Job, and of the secret with all that its pod is given."""
    labels: Mapping[str, str]
    image: str
    """Of the agent's container; empty: what the template says."""
    words: Sequence[str]
    """Arguments of the image's program; none: what the template says."""
    variables: Sequence[str]
    """Names of its environment; their values lie in the secret."""
    deadline_s: float


def checked(template: object, where: str) -> dict[str, Any]:
    """The template, if it is one. Raises InvalidFieldError."""
    if not isinstance(template, dict):
        raise _wrong(where, "a YAML mapping", type(template).__name__)
    found = cast("dict[str, Any]", template)
    kind = f"{found.get('apiVersion')} {found.get('kind')}"
    if kind != "batch/v1 Job":
        raise _wrong(f"{where}: apiVersion and kind", "batch/v1 Job", kind)
    try:
        agent: object = found["spec"]["template"]["spec"]["containers"][0]
    except (LookupError, TypeError):
        agent = None
    if not isinstance(agent, dict):
        raise _wrong(where, "spec.template.spec.containers, the agent's first", "none")
    return found


def filled(template: Mapping[str, Any], filling: Filling) -> dict[str, Any]:
    """The Job of one episode: one pod, tried once, that ends itself at its deadline."""
    job = copy.deepcopy(dict(template))
    meta, spec = job.setdefault("metadata", {}), job["spec"]
    meta["name"] = filling.name
    meta["labels"] = {**meta.get("labels", {}), **filling.labels}
    spec |= {"backoffLimit": 0, "completions": 1, "parallelism": 1}
    spec["activeDeadlineSeconds"] = max(1, math.ceil(filling.deadline_s))
    spec.setdefault("ttlSecondsAfterFinished", KEPT_S)
    pod_meta = spec["template"].setdefault("metadata", {})
    pod_meta["labels"] = {**pod_meta.get("labels", {}), **filling.labels}
    _fill_pod(spec["template"]["spec"], filling)
    return job


def _fill_pod(pod: dict[str, Any], filling: Filling) -> None:
    pod |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1}
    pod.setdefault("automountServiceAccountToken", False)
    pod.setdefault("enableServiceLinks", False)
    items = [{"key": TASK_FILE, "path": TASK_FILE}]
    volume = {"name": _VOLUME, "secret": {"secretName": filling.name, "items": items}}
    pod["volumes"] = [*pod.get("volumes", []), volume]
    agent = pod["containers"][0]
    if filling.image:
        agent["image"] = filling.image
    if filling.words:
        agent["args"] = list(filling.words)
    mount = {"name": _VOLUME, "mountPath": TASK_PLACE, "readOnly": True}
    agent["volumeMounts"] = [*agent.get("volumeMounts", []), mount]
    agent["terminationMessagePath"] = REWARD_PATH
    ours = [_variable(name, filling.name) for name in filling.variables]
    agent["env"] = [*agent.get("env", []), *ours]


def _variable(name: str, secret: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}}


def secret(filling: Filling, job_uid: str, values: Mapping[str, str]) -> dict[str, Any]:
    """The secret of a Job, which goes when the Job does."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": filling.name, "uid": job_uid}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": filling.name,
            "labels": dict(filling.labels),
            "ownerReferences": [owner],
        },
        "stringData": dict(values),
    }


def _wrong(field: str, limit: str, value: str) -> InvalidFieldError:
    return InvalidFieldError(field, limit=limit, value=value)
