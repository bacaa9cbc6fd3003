"""The Helm chart, rendered by Helm's own code."""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib
import re
import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.wire.tls import MEMBER_NAME, name_of
from quire_server.access import certs
from quire_server.config import SECRET_BYTES_MIN
from tests.unit.kubernetes_checks import assert_confined, assert_valid, assert_variables_are_read

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed (make test-chart installs it)")
manifests = importlib.import_module("tools.manifests")

CHART, MANIFESTS, VARIANTS = manifests.CHART, manifests.MANIFESTS, manifests.VARIANTS
rendered, manifest = manifests.rendered, manifests.manifest
ROLES = ("gateway", "orchestrator", "storage", "scheduler", "decoder")
Objects = dict[tuple[str, str], dict[str, Any]]
PLAIN = {"tls": {"enabled": False}}


def by_name(objects: list[dict[str, Any]]) -> Objects:
    """Return the objects by kind and name, secrets decoded."""
    for item in objects:
        if item["kind"] == "Secret":
            item["stringData"] = {name: base64.b64decode(text).decode() for name, text in item.pop("data").items()}
    return {(item["kind"], item["metadata"]["name"]): item for item in objects}


ALL: list[dict[str, Any]] = [
    {},
    yaml.safe_load((CHART / "values-trial.yaml").read_text()),
    {"tls": {"certificates": "secrets"}},
    {"tls": {"certificates": "cert-manager"}},
    {"decoder": {"gpus": 2}, **PLAIN},
    {"rdma": {"enabled": True}, **PLAIN},
    {"rdma": {"enabled": True, "root": True}},
    {"sharedMemory": {"enabled": True}},
    {"ioUring": {"enabled": True}},
    {"monitoring": {"enabled": True}},
    {"redis": {"cluster": True, "backup": {"claim": "backups"}}},
    {"redis": {"backup": {"claim": "backups", "schedule": "0 3 * * *", "keep": 7}}},
    {"redis": {"trial": True}, "clusterSecret": {"generate": False}, "decoder": {"enabled": False}},
    {"ipv6": True},
    {"pods": {"hostNetwork": True, "runtimeClassName": "nvidia"}, "nodeCidrs": ["10.1.0.0/16", "fd00::/64"]},
    {"egressTo": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "networkPolicies": True},
    {"egressPorts": []},
    {
        "image": {"registry": "registry.example/quire/", "tag": "1.2", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "pull"}],
        "storage": {"nodeSelector": {"drives": "nvme"}, "volume": {"storageClass": "local", "size": "2Ti"}},
        "gateway": {"serviceType": "LoadBalancer", "serviceAnnotations": {"a": "b"}, "env": {"QUIRE_GATEWAY_AUTH": 1}},
        "decoder": {"tolerations": [{"key": "images", "operator": "Exists"}]},
        "objects": {"endpoint": "http://rgw:8000"},
        "scheduler": {"replicas": 3},
    },
]


@pytest.mark.parametrize("values", ALL, ids=str)
def test_what_it_renders_is_sound(values: dict[str, Any]) -> None:
    objects = rendered(values)
    assert_valid(objects)
    assert_confined(objects, trial=bool(values.get("redis", {}).get("trial")))
    assert_variables_are_read(objects)


def test_snapshots_of_redis_go_into_a_claim_if_there_is_one() -> None:
    assert not [item for item in rendered({}) if item["kind"] == "CronJob"]
    for cluster, urls in ((True, 6), (False, 0)):
        objects = rendered({"redis": {"cluster": cluster, "backup": {"claim": "backups"}}})
        (job,) = [item for item in objects if item["kind"] == "CronJob"]
        pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "backups"
        assert (
            pod["securityContext"]["runAsNonRoot"] and pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
        )
        assert len(pod["containers"][0].get("args", [])) == urls
        (script,) = [
            item["data"] for item in objects if item["metadata"]["name"] == "quire-redis-backup" and "data" in item
        ]
        assert script["backup.sh"].strip() == (CHART / "redis-backup.sh").read_text().strip()


def test_every_redis_of_the_charts_refuses_what_it_has_no_room_for() -> None:
    for values in ({"redis": {"trial": True}}, {"redis": {"cluster": True, "maxmemory": "2gb"}}):
        (redis,) = [
            item
            for item in rendered(values)
            if item["kind"] in ("Deployment", "StatefulSet") and item["metadata"]["name"] == "quire-redis"
        ]
        container = redis["spec"]["template"]["spec"]["containers"][0]
        if "trial" in values["redis"]:
            assert container["command"][-4:] == ["--maxmemory", "512mb", "--maxmemory-policy", "noeviction"]
        else:
            assert {"name": "MAXMEMORY", "value": "2gb"} in container["env"]
            start = (CHART / "redis-cluster-start.sh").read_text()
            assert '--maxmemory "${MAXMEMORY:-0}" --maxmemory-policy noeviction' in start


def test_cert_manager_makes_what_services_mount() -> None:
    """Each is made out to the members' name and to its service's, which are what services check."""
    objects = rendered({"tls": {"certificates": "cert-manager"}})
    made = {item["spec"]["secretName"]: item["spec"] for item in objects if item["kind"] == "Certificate"}
    for role in (*ROLES, "operator"):
        assert made.pop(f"quire-{role}-tls")["dnsNames"] == [MEMBER_NAME, name_of(role)]
    assert made.keys() == {"quire-public-tls", "quire-authority"}


def test_pods_are_scaled_by_what_the_adapter_makes() -> None:
    rules = yaml.safe_load((CHART.parents[2] / "observability/prometheus-adapter.yaml").read_text())["rules"]["custom"]
    objects = by_name(rendered({"monitoring": {"enabled": True}, "decoder": {"gpus": 4, "queue": 3}}))
    targets = {
        metric["pods"]["metric"]["name"]: metric["pods"]["target"]["averageValue"]
        for role in ("gateway", "decoder")
        for metric in objects["HorizontalPodAutoscaler", f"quire-{role}"]["spec"]["metrics"]
        if metric["type"] == "Pods"
    }
    assert targets.keys() == {rule["name"]["as"] for rule in rules}
    assert targets == {"quire_gateway_transfers": "64", "quire_lookup_seconds_p99": "20m", "quire_decoder_queue": "12"}
    (decoder,) = objects["Deployment", "quire-decoder"]["spec"]["template"]["spec"]["containers"]
    assert decoder["resources"]["limits"]["nvidia.com/gpu"] == "4"


def test_a_redis_cluster_is_where_services_look_for_it() -> None:
    objects = by_name(rendered({"redis": {"cluster": True}}))
    assert objects["ConfigMap", "quire"]["data"]["QUIRE_REDIS_URL"].startswith("redis+cluster://quire-redis-0.")
    assert objects["StatefulSet", "quire-redis"]["spec"]["replicas"] == 6
    assert (
        objects["ConfigMap", "quire-redis-start"]["data"]["start.sh"] == (CHART / "redis-cluster-start.sh").read_text()
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_manifests_are_rendered_from_the_chart(name: str) -> None:
    assert (MANIFESTS / f"{name}.yaml").read_text() == manifest(name), "make generated"


def test_each_installation_has_a_secret_of_its_own() -> None:
    objects = [by_name(rendered({}))["Secret", "quire-cluster"] for _ in range(2)]
    secrets = [secret["stringData"]["QUIRE_CLUSTER_SECRET"] for secret in objects]
    assert all(len(secret) >= SECRET_BYTES_MIN for secret in secrets) and len(set(secrets)) == 2
    assert objects[0]["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_the_default_is_mutual_tls_between_roles(tmp_path: Path) -> None:
    """The generated certificates do what those of `quire certs` do."""
    objects = by_name(rendered({"tls": {"hosts": ["quire.example"]}}))
    secrets = {name: value["stringData"] for (kind, name), value in objects.items() if kind == "Secret"}
    secrets = {name: value for name, value in secrets.items() if "tls.crt" in value}
    assert secrets.keys() == {"quire-authority", *(f"quire-{role}-tls" for role in (*ROLES, "operator", "public"))}
    for name, files in secrets.items():
        for file, content in files.items():
            (tmp_path / f"{name}-{file}").write_text(content)
    member = functools.partial(handshake, tmp_path, client="quire-gateway-tls")
    for role in ROLES:
        assert member(server=f"quire-{role}-tls", host=MEMBER_NAME) == {MEMBER_NAME, f"{role}.{MEMBER_NAME}"}
    for host in ("quire-gateway", "quire-gateway.quire.svc", "quire.example"):
        assert host in member(server="quire-public-tls", host=host)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        member(server="quire-public-tls", host=MEMBER_NAME)
    others = by_name(rendered({}))
    own = objects["Secret", "quire-authority"], others["Secret", "quire-authority"]
    assert own[0]["stringData"]["tls.key"] != own[1]["stringData"]["tls.key"]


def handshake(folder: Path, *, server: str, client: str, host: str) -> set[str]:
    """Connects in memory, with both sides' certificates required.

    Returns:
        The names of the server's certificate.

    Raises:
        ssl.SSLError: A side does not accept the other.
    """
    contexts = {}
    for side, name in ((ssl.PROTOCOL_TLS_SERVER, server), (ssl.PROTOCOL_TLS_CLIENT, client)):
        context = contexts[side] = ssl.SSLContext(side)
        context.load_cert_chain(folder / f"{name}-tls.crt", folder / f"{name}-tls.key")
        context.load_verify_locations(folder / f"{name}-ca.crt")
        context.verify_mode = ssl.CERT_REQUIRED
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    connected = contexts[ssl.PROTOCOL_TLS_CLIENT].wrap_bio(to_client, to_server, server_hostname=host)
    serving = contexts[ssl.PROTOCOL_TLS_SERVER].wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for end in (connected, serving):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    certificate: dict[str, Any] = connected.getpeercert() or {}
    assert serving.getpeercert()
    return {name for kind, name in certificate["subjectAltName"] if kind == "DNS"}


def test_values_reach_the_pods() -> None:
    objects = by_name(rendered(ALL[-1]))
    storage = objects["StatefulSet", "quire-storage"]["spec"]
    assert storage["template"]["spec"]["nodeSelector"] == {"drives": "nvme"}
    assert storage["volumeClaimTemplates"][0]["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "local",
        "resources": {"requests": {"storage": "2Ti"}},
    }
    gateway = objects["Deployment", "quire-gateway"]["spec"]["template"]["spec"]["containers"][0]
    assert gateway["image"] == "registry.example/quire/quire-gateway:1.2" and gateway["imagePullPolicy"] == "Always"
    assert {"name": "QUIRE_GATEWAY_AUTH", "value": "1"} in gateway["env"]
    data = objects["ConfigMap", "quire"]["data"]
    assert data["AWS_ENDPOINT_URL"] == "http://rgw:8000" and data["QUIRE_SCHEDULER_ADDRESS"].count(",") == 2


def pods_of(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the templates of pods by the role of each."""
    templates = [item["spec"]["template"] for item in objects if item["kind"] in ("Deployment", "StatefulSet")]
    return {template["metadata"]["labels"]["app.kubernetes.io/name"]: template for template in templates}


def test_a_role_has_the_values_of_all_pods_or_its_own() -> None:
    claim = {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}
    mount = {"name": "models", "mountPath": "/models", "readOnly": True}
    spread = [{"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}]
    values = {
        "pods": {"nodeSelector": {"pool": "any"}, "podAnnotations": {"team": "a"}, "priorityClassName": "low"},
        "storage": {
            "nodeSelector": {"drives": "nvme"},
            "podAnnotations": {"k8s.v1.cni.cncf.io/networks": "rdma-net"},
            "priorityClassName": "cache",
            "hostNetwork": True,
            "podLabels": {"app.kubernetes.io/name": "another", "team": "storage"},
            "topologySpreadConstraints": spread,
        },
        "nodeCidrs": ["10.1.0.0/16"],
        "decoder": {"volumes": [claim], "volumeMounts": [mount], "affinity": {"podAffinity": {}}},
    }
    objects = rendered(values)
    assert_valid(objects)
    pods = pods_of(objects)
    storage, gateway, decoder = (pods[role] for role in ("storage", "gateway", "decoder"))
    assert gateway["spec"]["nodeSelector"] == {"pool": "any"} and storage["spec"]["nodeSelector"] == {"drives": "nvme"}
    assert gateway["metadata"]["annotations"]["team"] == "a" and "team" not in storage["metadata"]["annotations"]
    assert storage["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "rdma-net"
    assert [pod["spec"]["priorityClassName"] for pod in (gateway, storage)] == ["low", "cache"]
    assert storage["spec"]["hostNetwork"] and storage["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    labels = storage["metadata"]["labels"]
    assert (labels["app.kubernetes.io/name"], labels["team"]) == ("storage", "storage")
    assert "hostNetwork" not in gateway["spec"] and storage["spec"]["topologySpreadConstraints"] == spread
    assert decoder["spec"]["affinity"] == {"podAffinity": {}} and claim in decoder["spec"]["volumes"]
    assert mount in decoder["spec"]["containers"][0]["volumeMounts"] and claim not in gateway["spec"]["volumes"]


def test_two_releases_of_a_namespace_share_nothing() -> None:
    """No object, and no label by which one would choose the other's pods."""
    values = {"redis": {"cluster": True, "backup": {"claim": "backups"}}, "monitoring": {"enabled": True}}
    releases = [by_name(rendered(values, name)) for name in ("quire", "second")]
    assert not releases[0].keys() & releases[1].keys()
    assert {name.removeprefix("second-") for _, name in releases[1]} == {name for _, name in releases[0]}
    pods = [list(pods_of(list(objects.values())).values()) for objects in releases]
    selectors = re.findall(r"(?:matchLabels|selector): ({[^{}]*})", str(list(releases[0].values())).replace("'", ""))
    own = [text for text in selectors if "quire.io/" not in text and "metadata.name" not in text]
    assert len(own) > 20 and all("instance: quire" in text for text in own)
    text = yaml.safe_dump(list(releases[1].values()))
    foreign = rf"(?<!second-)\bquire-(?:{'|'.join(ROLES)}|redis|public|cluster)"
    assert not re.findall(foreign, re.sub(r"image: \S+", "", text))
    assert all(pod["metadata"]["labels"]["app.kubernetes.io/instance"] == "second" for pod in pods[1])


def test_names_may_begin_with_something_else() -> None:
    """The chart before 0.3 used the same names for every release."""
    objects = by_name(rendered({"fullnameOverride": "quire"}, "production"))
    assert {name for _, name in objects} == {name for _, name in by_name(rendered({}))}
    with pytest.raises(helm.HelmError, match="longer than 39 characters"):
        rendered({}, 40 * "r")


def test_pods_of_the_hosts_network_are_let_in_by_address() -> None:
    with pytest.raises(helm.HelmError, match=r"storage\.hostNetwork: .*nodeCidrs"):
        rendered({"storage": {"hostNetwork": True}})
    objects = by_name(rendered({"storage": {"hostNetwork": True}, "nodeCidrs": ["10.1.0.0/16"]}))
    for name, way, peers in (("quire-closed", "ingress", "from"), ("quire-outwards", "egress", "to")):
        rule = objects["NetworkPolicy", name]["spec"][way][0]
        assert {"ipBlock": {"cidr": "10.1.0.0/16"}} in rule[peers], name
    assert rendered({"storage": {"hostNetwork": True}, "networkPolicies": False})


def test_without_ports_nothing_else_is_reached() -> None:
    """A rule without ports and peers allows everything."""
    peers: list[dict[str, Any]]
    for peers in ([], [{"ipBlock": {"cidr": "10.0.0.0/8"}}]):
        values = {"egressPorts": [], "egressTo": peers}
        rules = by_name(rendered(values))["NetworkPolicy", "quire-outwards"]["spec"]["egress"]
        assert len(rules) == 3 and all(rule["to"] for rule in rules)


def test_quire_certs_go_on_with_helms_authority(tmp_path: Path) -> None:
    """Helm calls an authority's key otherwise than cryptography would."""
    authority = by_name(rendered({}))["Secret", "quire-authority"]["stringData"]
    (tmp_path / "ca.pem").write_text(authority["tls.crt"])
    (tmp_path / "ca-key.pem").write_text(authority["tls.key"])
    certs.make(tmp_path, [], 1)
    for role in ("gateway", "storage"):
        for name in ("ca.crt", "tls.crt", "tls.key"):
            target = tmp_path / f"{role}-{name}"
            target.write_text((tmp_path / role / name).read_text())
    assert MEMBER_NAME in handshake(tmp_path, server="storage", client="gateway", host=MEMBER_NAME)


def test_with_ipv6_addresses_are_in_brackets() -> None:
    text = yaml.safe_dump(rendered({"ipv6": True, "redis": {"cluster": True}}))
    assert "0.0.0.0" not in text and "'[::]:7410'" in text and "'[$(POD_IP)]:7410'" in text
    assert not re.search(r"[^[]\$\(POD_IP\)", text)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"storage": {"driveBytes": str(100 << 30)}}, "more than 95 % of storage.volume.size"),
        ({"storage": {"volume": {"size": "64G"}}}, "more than 95 % of storage.volume.size"),
        ({"storage": {"arenaBytes": str(11 << 30)}}, "more than the limit of memory"),
        ({"storage": {"resources": {"limits": {"memory": 9 << 30}}}}, "more than the limit of memory"),
        ({"storage": {"volume": {"size": "100 GB"}}}, "no quantity of bytes"),
        ({"storage": {"arenaBytes": str(11 << 30)}, "rdma": {"enabled": True}}, "more than rdma.hugePages"),
    ],
)
def test_storage_that_does_not_fit_its_volume_or_memory_is_refused(values: dict[str, Any], what: str) -> None:
    with helm.Chart.load(str(CHART)) as chart, pytest.raises(helm.HelmError, match=what):
        chart.render(values, name="quire", namespace="quire")


def test_images_are_named_by_their_digests() -> None:
    digests = {role: f"sha256:{number:064x}" for number, role in enumerate(ROLES)}
    text = yaml.safe_dump(rendered({"image": {"registry": "registry.example", "digests": digests}}))
    images = set(re.findall(r"image: (\S+)", text))
    assert images == {f"registry.example/quire-{role}@{digest}" for role, digest in digests.items()}


def test_a_change_of_the_configuration_rolls_the_pods() -> None:
    def sums(values: dict[str, Any]) -> set[str]:
        return {
            each["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
            for each in rendered(values)
            if each["kind"] in ("Deployment", "StatefulSet")
        }

    (before,), (after,) = sums({}), sums({"config": {"QUIRE_STORAGE_THETA_BYTES": 1 << 20}})
    assert before != after


def test_the_linter_finds_nothing() -> None:
    messages = helm.lint(str(CHART), strict=True)["messages"]
    assert [each["error"] for each in messages if each["error"] != "icon is recommended"] == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"replicas": 3},
        {"storage": {"replica": 3}},
        {"tls": {"enabled": "yes"}},
        {"image": {"digests": {"gateway": "1.2"}}},
        {"pods": {"hostnetwork": True}},
        {"storage": {"driveBytes": "64Gi"}},
    ],
    ids=str,
)
def test_a_wrong_value_is_refused(wrong: dict[str, Any]) -> None:
    with helm.Chart.load(str(CHART)) as chart, pytest.raises(helm.HelmValuesError, match=next(iter(wrong))):
        chart.render(wrong, name="quire", namespace="quire")


def test_every_value_is_read() -> None:
    """A value that no template names does nothing."""
    templates = "".join(file.read_text() for file in (CHART / "templates").iterdir())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for group, each in values.items():
        assert f".Values.{group}" in templates, group
        for name in each if isinstance(each, dict) else ():
            assert re.search(rf"(\.(Values\.{group}|values)|\$own)\.{name}\b", templates), f"{group}.{name}"


def test_two_kinds_of_redis_are_refused() -> None:
    with helm.Chart.load(str(CHART)) as chart, pytest.raises(helm.HelmError, match="choose one"):
        chart.render({"redis": {"trial": True, "cluster": True}}, name="quire", namespace="quire")
