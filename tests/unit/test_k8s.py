"""The manifests: what kustomize makes of them is valid, closed where it should be, and asks for what services know."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from quire.wire.tls import MEMBER_NAME, name_of
from quire_server.config import variable_name
from tests.unit.configs import CONFIGS

ROOT = Path(__file__).resolve().parents[2] / "k8s"
LAYERS = [
    "base",
    "overlays/dev",
    "overlays/redis-cluster",
    "overlays/rdma",
    "overlays/rdma-root",
    "overlays/io-uring",
    "overlays/gpu",
    "overlays/mtls",
    "overlays/cert-manager",
    "overlays/monitoring",
    "overlays/production",
    "overlays/shared-memory",
]
KUBERNETES = "1.32"
OPERATORS = ("cert-manager.io", "monitoring.coreos.com")
"""Their kinds are not Kubernetes' own: there is no schema of them here."""
ROLES = {"orchestrator", "scheduler", "gateway", "storage", "decoder"}


def built(layer: str) -> list[dict[str, Any]]:
    """What kustomize makes of a folder of k8s."""
    tool = ["kubectl", "kustomize"] if shutil.which("kubectl") else ["kustomize", "build"]
    if shutil.which(tool[0]) is None:
        pytest.skip("neither kubectl nor kustomize is installed")
    made = subprocess.run([*tool, str(ROOT / layer)], capture_output=True, text=True, timeout=60, check=False)
    assert made.returncode == 0, made.stderr
    return [each for each in yaml.safe_load_all(made.stdout) if each]


def _workloads(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] in ("Deployment", "StatefulSet")}


def test_every_file_is_a_kubernetes_object() -> None:
    """By itself, without kustomize."""
    redis = [ROOT / "overlays/dev/redis.yaml", ROOT / "components/redis-cluster/redis.yaml"]
    for file in [*sorted((ROOT / "base").glob("*.yaml")), *redis]:
        for each in yaml.safe_load_all(file.read_text()):
            if file.name != "kustomization.yaml":
                kubernetes_validate.validate(each, KUBERNETES, strict=True)


def test_what_is_no_kubernetes_object_is_noticed() -> None:
    (redis, *_) = yaml.safe_load_all((ROOT / "overlays/dev/redis.yaml").read_text())
    redis["spec"]["replica"] = redis["spec"].pop("replicas")
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(redis, KUBERNETES, strict=True)


@pytest.mark.parametrize("layer", LAYERS)
def test_what_kustomize_makes_is_valid(layer: str) -> None:
    objects = built(layer)
    for each in objects:
        if each["apiVersion"].partition("/")[0] not in OPERATORS:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)
    assert {f"quire-{role}" for role in ROLES} <= _workloads(objects).keys()


def test_a_certificate_is_there_for_whatever_mounts_one() -> None:
    """By cert-manager; each is made out to the members' name and to its service's, which are what services check."""
    objects = built("overlays/cert-manager")
    made = {each["spec"]["secretName"]: each["spec"] for each in objects if each["kind"] == "Certificate"}
    mounted = set()
    for name, workload in _workloads(objects).items():
        volumes = workload["spec"]["template"]["spec"]["volumes"]
        mine = {each["secret"]["secretName"] for each in volumes if "secret" in each} - {"quire-public-tls"}
        assert mine == {f"{name}-tls"}, name
        mounted |= mine
        assert made[f"{name}-tls"]["dnsNames"] == [MEMBER_NAME, name_of(name.removeprefix("quire-"))]
    assert mounted | {"quire-public-tls", "quire-operator-tls", "quire-authority"} == made.keys()


def test_with_tls_nothing_speaks_plain_text() -> None:
    objects = built("overlays/mtls")
    service = next(
        each for each in objects if each["kind"] == "Service" and each["metadata"]["name"] == "quire-gateway"
    )
    assert {port["name"] for port in service["spec"]["ports"]} == {"grpc", "grpc-tls", "images-tls", "s3-tls"}
    container = _workloads(objects)["quire-gateway"]["spec"]["template"]["spec"]["containers"][0]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["QUIRE_GATEWAY_HTTP_LISTEN"] == variables["QUIRE_GATEWAY_S3_LISTEN"] == "off"
    allowed = next(each for each in objects if each["metadata"]["name"] == "quire-gateway-open")
    assert {port["port"] for port in allowed["spec"]["ingress"][0]["ports"]} == {7443, 7444, 7445}


def test_a_change_of_the_configuration_rolls_the_services() -> None:
    """Its name has a hash of its content."""
    objects = built("base")
    (config,) = [each["metadata"]["name"] for each in objects if each["kind"] == "ConfigMap"]
    assert config.startswith("quire-") and len(config) > len("quire-")
    for name, workload in _workloads(objects).items():
        sources = workload["spec"]["template"]["spec"]["containers"][0]["envFrom"]
        assert {"configMapRef": {"name": config}} in sources, name


@pytest.mark.parametrize("layer", LAYERS)
def test_pods_are_confined_probed_and_ask_for_resources(layer: str) -> None:
    for name, workload in _workloads(built(layer)).items():
        if name == "quire-redis" and layer == "overlays/dev":
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
        variables = [each["name"] for each in container["env"]]
        assert len(variables) == len(set(variables)), name


def test_a_pod_gets_the_time_that_its_service_may_take_to_stop() -> None:
    """Drain and grace fit into terminationGracePeriodSeconds, or the kubelet kills what still works."""
    objects = built("base")
    data = next(each["data"] for each in objects if each["kind"] == "ConfigMap")
    for name, workload in _workloads(objects).items():
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
    for layer in ("base", "overlays/mtls"):
        objects = built(layer)
        for name, workload in _workloads(objects).items():
            container = workload["spec"]["template"]["spec"]["containers"][0]
            paths = {
                kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("readiness", "liveness", "startup")
            }
            ready = "/redundancy" if name == "quire-storage" else "/readyz"
            assert paths == {"readiness": ready, "liveness": "/healthz", "startup": "/readyz"}, name
        (headless,) = [
            each for each in objects if (each["kind"], each["metadata"]["name"]) == ("Service", "quire-storage")
        ]
        assert headless["spec"]["publishNotReadyAddresses"] is True


def test_what_gateways_are_scaled_by_is_made_by_the_adapter() -> None:
    rules = yaml.safe_load((ROOT.parent / "observability/prometheus-adapter.yaml").read_text())["rules"]["custom"]
    scalers = [each for each in built("overlays/monitoring") if each["kind"] == "HorizontalPodAutoscaler"]
    (scaler,) = [each for each in scalers if each["metadata"]["name"] == "quire-gateway"]
    asked = {each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"] if each["type"] == "Pods"}
    assert asked == {each["name"]["as"] for each in rules} == {"quire_gateway_transfers", "quire_lookup_seconds_p99"}


@pytest.mark.parametrize("layer", LAYERS)
def test_every_variable_is_one_that_a_service_reads(layer: str) -> None:
    known = {
        variable_name(importlib.import_module(f"{package}.config").PREFIX, field)
        for package, name in CONFIGS.items()
        for field in dataclasses.fields(getattr(importlib.import_module(f"{package}.config"), name))
    }
    for each in built(layer):
        names = set(each.get("data", {})) if each["kind"] == "ConfigMap" else set()
        for workload in _workloads([each]).values():
            names |= {
                variable["name"] for variable in workload["spec"]["template"]["spec"]["containers"][0].get("env", [])
            }
        wrong = {name for name in names if name.startswith("QUIRE_")} - known
        assert not wrong, f"{each['kind']} {each['metadata']['name']}: {wrong}"


def test_only_the_gateway_is_open() -> None:
    """Of all policies one allows every source, and it selects the gateway."""
    policies = [each["spec"] for each in built("base") if each["kind"] == "NetworkPolicy"]
    all_pods = {"matchLabels": {"app.kubernetes.io/part-of": "quire"}}
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
    return next(policy["spec"] for policy in built("base") if policy["metadata"]["name"] == name)


def test_engines_reach_the_data_plane_whatever_else_they_are() -> None:
    """The label that kustomize adds to selectors is not asked of them."""
    (peer,) = _policy("quire-data-plane")["ingress"][0]["from"]
    assert "matchLabels" not in peer["podSelector"]
    assert peer["podSelector"]["matchExpressions"][0]["key"] == "quire.io/client"


def test_disruptions_leave_one_pod() -> None:
    budgets = [each for each in built("base") if each["kind"] == "PodDisruptionBudget"]
    assert {each["metadata"]["name"] for each in budgets} == {f"quire-{role}" for role in ROLES}
