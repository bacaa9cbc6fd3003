"""Kubernetes objects as `podman play kube` can run them: some of what they ask for is put in their place."""

from __future__ import annotations

import base64
import json
from typing import Any

Object = dict[str, Any]
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def for_podman(objects: list[Object]) -> str:
    """ConfigMaps, and a pod for each workload, as JSON documents.

    podman (4.3) knows no StatefulSet, no downward API and no headless service, and cannot read a Secret into the
    environment: pods get the name that they would have, their variables as they would be, and an empty drive.
    """
    secrets = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "Secret"}
    made = [_plain(each) for each in objects if each["kind"] == "ConfigMap"]
    made += [_pod(each, secrets) for each in objects if each["kind"] in ("Deployment", "StatefulSet")]
    return "\n---\n".join(json.dumps(each) for each in made)


def _plain(config: Object) -> Object:
    """A headless service's names are its pods' names here."""
    data = {key: value.replace(".quire-scheduler:", ":") for key, value in config["data"].items()}
    return {**config, "data": data}


def _pod(workload: Object, secrets: dict[str, dict[str, str]]) -> Object:
    template = workload["spec"]["template"]
    spec = template["spec"]
    name = workload["metadata"]["name"] + ("-0" if workload["kind"] == "StatefulSet" else "")
    spec.pop("topologySpreadConstraints", None)
    for claim in workload["spec"].get("volumeClaimTemplates", []):
        spec["volumes"].append({"name": claim["metadata"]["name"], "emptyDir": {}})
    for container in spec["containers"]:
        container["env"] = _variables(container, name, secrets)
        container["envFrom"] = [each for each in container.get("envFrom", []) if "secretRef" not in each]
        if not name.startswith("quire-gateway"):
            container.pop("ports", None)  # podman opens them on the host
        for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
            container.pop(probe, None)  # podman has other ones
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": template["metadata"]["labels"]},
        "spec": spec,
    }


def _of_the_pod(source: Object, name: str) -> str:
    """Its name for both name and address; it has no zone."""
    return "" if "zone" in source["fieldRef"]["fieldPath"] else name


def _variables(container: Object, name: str, secrets: dict[str, dict[str, str]]) -> list[dict[str, str]]:
    made = [{"name": "PATH", "value": _PATH}] if container["name"] == "redis" else []
    for each in container.get("env", []):
        value = _of_the_pod(each["valueFrom"], name) if "valueFrom" in each else each.get("value", "")
        for placeholder in ("$(POD_NAME)", "$(POD_IP)"):
            value = value.replace(placeholder, name)
        made.append({"name": each["name"], "value": value.replace(".quire-storage:", ":")})
    for source in container.get("envFrom", []):
        data = secrets.get(source.get("secretRef", {}).get("name", ""), {})
        made += [{"name": key, "value": base64.b64decode(value).decode()} for key, value in data.items()]
    return made
