"""The manifests of k8s/manifests: valid, closed where they should be, and configured by what services read."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.unit.configs import CONFIGS
from tests.unit.kubernetes_checks import (
    KUBERNETES,
    assert_confined,
    assert_valid,
    assert_variables_are_read,
    workloads,
)

MANIFESTS = Path(__file__).resolve().parents[2] / "k8s" / "manifests"
NAMES = ["trial", "quire"]
ROLES = {"orchestrator", "scheduler", "gateway", "storage", "decoder"}


def objects_of(name: str) -> list[dict[str, Any]]:
    """Read the objects of a manifest."""
    return list(yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text()))


def test_there_are_no_other_manifests() -> None:
    assert {file.stem for file in MANIFESTS.iterdir()} == set(NAMES)


def test_what_is_no_kubernetes_object_is_noticed() -> None:
    gateway = workloads(objects_of("trial"))["quire-orchestrator"]
    gateway["spec"]["replica"] = gateway["spec"].pop("replicas")
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(gateway, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_manifests_are_sound(name: str) -> None:
    objects = objects_of(name)
    assert {f"quire-{role}" for role in ROLES} <= workloads(objects).keys()
    assert_valid(objects)
    assert_confined(objects, trial=name == "trial")
    assert_variables_are_read(objects)


def test_each_service_mounts_its_own_certificate() -> None:
    """Named as `quire certs` and the chart name them; gateways have the public one, too."""
    for name, workload in workloads(objects_of("quire")).items():
        volumes = workload["spec"]["template"]["spec"]["volumes"]
        mounted = {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}
        assert mounted == {f"{name}-tls"} | ({"quire-public-tls"} if name == "quire-gateway" else set()), name


def test_with_tls_nothing_speaks_plain_text() -> None:
    objects = objects_of("quire")
    service = next(
        each for each in objects if each["kind"] == "Service" and each["metadata"]["name"] == "quire-gateway"
    )
    assert {port["name"] for port in service["spec"]["ports"]} == {"grpc", "grpc-tls", "images-tls", "s3-tls"}
    container = workloads(objects)["quire-gateway"]["spec"]["template"]["spec"]["containers"][0]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["QUIRE_GATEWAY_HTTP_LISTEN"] == variables["QUIRE_GATEWAY_S3_LISTEN"] == "off"
    allowed = next(each for each in objects if each["metadata"]["name"] == "quire-gateway-open")
    assert {port["port"] for port in allowed["spec"]["ingress"][0]["ports"]} == {7443, 7444, 7445}


def test_a_pod_gets_the_time_that_its_service_may_take_to_stop() -> None:
    """Drain and grace fit into terminationGracePeriodSeconds, or the kubelet kills what still works."""
    objects = objects_of("quire")
    data = next(each["data"] for each in objects if each["kind"] == "ConfigMap")
    for name, workload in workloads(objects).items():
        service = name.removeprefix("quire-")
        module = importlib.import_module(f"quire_{service}.config")
        grace = {
            field.name: field.default for field in dataclasses.fields(getattr(module, CONFIGS[f"quire_{service}"]))
        }
        drain_s = float(data[f"{module.PREFIX}DRAIN_S"])
        grace_s = float(data.get(f"{module.PREFIX}STOP_GRACE_S", grace["stop_grace_s"]))
        allowed = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        # Storage waits for deliveries once more when its frontend is closed.
        assert drain_s + 2 * grace_s < allowed, name


def test_probes_ask_what_a_service_answers() -> None:
    """By HTTP, which works with mutual TLS too. A roll of storage waits for copies; addresses do not wait for that."""
    objects = objects_of("quire")
    for name, workload in workloads(objects).items():
        container = workload["spec"]["template"]["spec"]["containers"][0]
        paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("readiness", "liveness", "startup")}
        ready = "/redundancy" if name == "quire-storage" else "/readyz"
        assert paths == {"readiness": ready, "liveness": "/healthz", "startup": "/readyz"}, name
    (headless,) = [item for item in objects if (item["kind"], item["metadata"]["name"]) == ("Service", "quire-storage")]
    assert headless["spec"]["publishNotReadyAddresses"] is True


def test_only_the_gateway_is_open() -> None:
    """Of all policies one allows every source, and it selects the gateway."""
    policies = [each["spec"] for each in objects_of("quire") if each["kind"] == "NetworkPolicy"]
    all_pods = {"matchLabels": {"app.kubernetes.io/part-of": "quire", "app.kubernetes.io/instance": "quire"}}
    assert any(each["podSelector"] == all_pods for each in policies), "what is not allowed is refused"
    for policy in policies:
        for rule in policy.get("ingress", []):
            if "from" not in rule:
                assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/name"] == "gateway"


def test_engines_are_named_by_namespace_and_pod() -> None:
    """A pod that labels itself reaches no data plane unless its namespace was let in."""
    (peer,) = _policy("quire-data-plane")["ingress"][0]["from"]
    assert peer["namespaceSelector"] == {"matchLabels": {"quire.io/clients": "true"}} and "podSelector" in peer


def test_services_connect_to_known_ports_only() -> None:
    """Any port of each other and of engines; elsewhere the ports of names, Redis, object stores and collectors."""
    policy = _policy("quire-outwards")
    assert policy["policyTypes"] == ["Egress"]
    *inside, anywhere = policy["egress"]
    assert all("to" in rule for rule in inside) and "to" not in anywhere
    ports = (443, 6379, 26379, 4317, 7070, 8000, 9000)
    assert anywhere["ports"] == [{"port": port, "protocol": "TCP"} for port in ports]


def _policy(name: str) -> dict[str, Any]:
    return next(policy["spec"] for policy in objects_of("quire") if policy["metadata"]["name"] == name)


def test_engines_reach_the_data_plane_whatever_else_they_are() -> None:
    """No other label is asked of them."""
    (peer,) = _policy("quire-data-plane")["ingress"][0]["from"]
    assert "matchLabels" not in peer["podSelector"]
    assert peer["podSelector"]["matchExpressions"][0]["key"] == "quire.io/client"


def test_disruptions_leave_one_pod() -> None:
    budgets = [each for each in objects_of("quire") if each["kind"] == "PodDisruptionBudget"]
    assert {each["metadata"]["name"] for each in budgets} == {f"quire-{role}" for role in ROLES}
