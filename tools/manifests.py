"""Renders the Helm chart into k8s/manifests, for `kubectl apply -f`; with --check, fails if a file differs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import helm_python as helm
import yaml

ROOT: Final = Path(__file__).resolve().parents[1]
CHART: Final = ROOT / "k8s" / "helm" / "quire"
MANIFESTS: Final = ROOT / "k8s" / "manifests"
_SECRETS: Final = {"clusterSecret": {"generate": False}, "tls": {"certificates": "secrets"}}
VARIANTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "trial": (
        "A trial: one of each service, a Redis, no tokens, no TLS.",
        {**yaml.safe_load((CHART / "values-trial.yaml").read_text()), "clusterSecret": {"generate": False}},
    ),
    "quire": ("Mutual TLS with certificates of `quire certs`, tokens, data over TCP.", _SECRETS),
}
"""What each file is, and the values of the chart that it is rendered with."""


def rendered(values: dict[str, Any], release: str = "quire") -> list[dict[str, Any]]:
    """Return the objects that the chart makes, as `helm install RELEASE --namespace quire` would."""
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name=release, namespace="quire")
    texts = (text for name, text in sorted(files.items()) if name.endswith(".yaml"))
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def manifest(name: str) -> str:
    """Return the text of a file."""
    about, values = VARIANTS[name]
    head = f"# {about}\n# Rendered from k8s/helm/quire by `make generated`; do not edit.\n"
    return head + yaml.safe_dump_all(rendered(values), sort_keys=False, width=120)


def main() -> None:
    """Write the files, or compare them."""
    for name in VARIANTS:
        file, text = MANIFESTS / f"{name}.yaml", manifest(name)
        if "--check" not in sys.argv[1:]:
            MANIFESTS.mkdir(exist_ok=True)
            file.write_text(text)
        elif file.read_text() != text:
            sys.exit(f"{file.name} is not what the chart renders; run `make generated`")


if __name__ == "__main__":
    main()
