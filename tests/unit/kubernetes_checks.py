"""Checks of Kubernetes objects: valid, confined, probed, and configured by variables that services read."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import kubernetes_validate

from quire_server.config import variable_name
from tests.unit.configs import CONFIGS

KUBERNETES = "1.32"
OPERATORS = ("cert-manager.io", "monitoring.coreos.com")
"""API groups of operators: no schemas of them are here."""

Objects = list[dict[str, Any]]


def workloads(objects: Objects) -> dict[str, dict[str, Any]]:
    """Return Deployments and StatefulSets by name."""
    return {item["metadata"]["name"]: item for item in objects if item["kind"] in ("Deployment", "StatefulSet")}


def assert_valid(objects: Objects) -> None:
    """Assert that Kubernetes' own schemas accept every object."""
    for item in objects:
        if item["apiVersion"].partition("/")[0] not in OPERATORS:
            kubernetes_validate.validate(item, KUBERNETES, strict=True)


def assert_confined(objects: Objects, *, trial: bool = False) -> None:
    """Assert that pods are confined, probed, spread, and ask for resources; the Redis of a trial is not."""
    for name, workload in workloads(objects).items():
        if name == "quire-redis" and trial:
            continue
        pod = workload["spec"]["template"]["spec"]
        container = pod["containers"][0]
        pins_memory = "IPC_LOCK" in container["securityContext"]["capabilities"].get("add", [])
        assert pod["securityContext"]["runAsNonRoot"] is not pins_memory, name
        assert container["securityContext"]["readOnlyRootFilesystem"] is True, name
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"], name
        assert {"readinessProbe", "livenessProbe", "startupProbe"} <= container.keys(), name
        assert container["resources"]["requests"] and container["resources"]["limits"], name
        assert pod["topologySpreadConstraints"], name
        variables = [variable["name"] for variable in container["env"]]
        assert len(variables) == len(set(variables)), name


def assert_variables_are_read(objects: Objects) -> None:
    """Assert that each QUIRE_ variable is one that a service reads."""
    known = {
        variable_name(importlib.import_module(f"{package}.config").PREFIX, field)
        for package, name in CONFIGS.items()
        for field in dataclasses.fields(getattr(importlib.import_module(f"{package}.config"), name))
    }
    for item in objects:
        names = set(item.get("data", {})) if item["kind"] == "ConfigMap" else set()
        for workload in workloads([item]).values():
            container = workload["spec"]["template"]["spec"]["containers"][0]
            names |= {variable["name"] for variable in container.get("env", [])}
        wrong = {name for name in names if name.startswith("QUIRE_")} - known
        assert not wrong, f"{item['kind']} {item['metadata']['name']}: {wrong}"
