"""`quire policy`, `quire tenant`: settings of operators."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from quire.model.errors import InvalidRequest
from quire_tools.cli.options import FOLDER, Admin, AsJson, Folder

if TYPE_CHECKING:
    from quire.client import AdminClient
    from quire.model.policy import PolicyList

console = Console()
policy_app = typer.Typer(no_args_is_help=True, help="What namespaces may take up, and for how long.")
tenant_app = typer.Typer(no_args_is_help=True, help="What tenants get of contended links, and may have stored.")
_MIB = 1 << 20


@policy_app.command("set")
def set_policy(
    namespace: Annotated[Path, typer.Option(help="the namespace, as JSON (the demo writes one)")],
    ttl_s: Annotated[int | None, typer.Option(help="seconds after which a stored chunk goes; 0: never", min=0)] = None,
    quota_mib: Annotated[
        int | None, typer.Option(help="what its chunks may take up in the cluster; 0: no limit", min=0)
    ] = None,
    folder: Folder = FOLDER,
    admin: Admin = "",
) -> None:
    """Set a namespace's policy. Omitted limits stay unchanged; without limits the policy is forgotten."""
    from quire_tools.cli.cluster import as_operator, read_namespace

    meant = read_namespace(namespace)

    async def work(operator: AdminClient) -> None:
        policy = await operator.set_policy(meant, ttl_s=ttl_s, quota_bytes=_bytes(quota_mib))
        quota = f"{policy.quota_bytes / _MIB:.0f} MiB" if policy.quota_bytes else "none"
        console.print(f"{meant.model_id}: ttl {f'{policy.ttl_s} s' if policy.ttl_s else 'none'}, quota {quota}")

    as_operator(folder, admin, work)


@policy_app.command("ls")
def list_policies(folder: Folder = FOLDER, admin: Admin = "", as_json: AsJson = False) -> None:
    """Policies that are set, by the first 16 bytes of the namespaces' digests."""
    namespaces = _found(folder, admin).namespaces
    if as_json:
        rows = [{**asdict(policy), "namespace": policy.namespace.hex()} for policy in namespaces]
        print(json.dumps(rows, indent=2))
        return
    table = Table("namespace", "ttl s", "quota MiB")
    for policy in namespaces:
        quota = f"{policy.quota_bytes / _MIB:.0f}" if policy.quota_bytes else "–"
        table.add_row(policy.namespace.hex(), str(policy.ttl_s or "–"), quota)
    console.print(table)


@tenant_app.command("set")
def set_tenant(
    name: Annotated[str, typer.Argument(help="as its access keys have it; empty: by --salt")] = "",
    salt: Annotated[str, typer.Option(help="its salt, in hexadecimal; empty for namespaces without")] = "",
    weight: Annotated[
        float | None, typer.Option(help="its part of a contended link is in proportion to this; 1 if it was never set")
    ] = None,
    cap_mb_per_s: Annotated[
        float | None, typer.Option(help="what it may have together, MB/s; 0: no cap", min=0)
    ] = None,
    stored_mib: Annotated[
        int | None, typer.Option(help="what it may have stored: S3 objects, images and chunks; 0: no limit", min=0)
    ] = None,
    folder: Folder = FOLDER,
    admin: Admin = "",
) -> None:
    """Set a tenant's policy. Omitted limits stay unchanged."""
    from quire_tools.cli.cluster import as_operator

    try:
        raw = bytes.fromhex(salt)
    except ValueError:
        raise InvalidRequest(f"{salt!r} is not hexadecimal", field="salt") from None
    if name and salt:
        raise InvalidRequest("a tenant is said by its name or by its salt", field="salt")
    cap = None if cap_mb_per_s is None else int(cap_mb_per_s * 1e6)
    subject = name or (f"salt {salt}" if salt else "no salt")

    async def work(operator: AdminClient) -> None:
        policy = await operator.set_tenant(
            raw, name=name, weight=weight, cap_bytes_per_s=cap, stored_bytes_max=_bytes(stored_mib)
        )
        rate = f"{policy.cap_bytes_per_s / 1e6:g} MB/s" if policy.cap_bytes_per_s else "none"
        quota = f"{policy.stored_bytes_max / _MIB:.0f} MiB" if policy.stored_bytes_max else "any"
        console.print(f"{subject}: weight {policy.weight:g}, cap {rate}, stored {quota}")

    as_operator(folder, admin, work)


@tenant_app.command("ls")
def list_tenants(folder: Folder = FOLDER, admin: Admin = "", as_json: AsJson = False) -> None:
    """Tenants for which something is set, and what limited ones keep.

    By name; by the digest of the salt where no access key has the tenant.
    """
    tenants = _found(folder, admin).tenants
    if as_json:
        rows = [
            {
                **asdict(state.policy),
                "name": state.name,
                "kept_bytes": state.kept_bytes,
                "namespaces": len(state.namespaces),
            }
            for state in tenants
        ]
        print(json.dumps(rows, indent=2))
        return
    table = Table("tenant", "weight", "cap MB/s", "stored MiB at most", "objects and images, MiB", "namespaces")
    for state in tenants:
        policy, limited = state.policy, bool(state.policy.stored_bytes_max)
        table.add_row(
            state.name or policy.tenant or "(no salt)",
            f"{policy.weight:g}",
            f"{policy.cap_bytes_per_s / 1e6:g}" if policy.cap_bytes_per_s else "–",
            f"{policy.stored_bytes_max / _MIB:.0f}" if limited else "–",
            f"{state.kept_bytes / _MIB:.1f}" if limited else "–",
            str(len(state.namespaces)) if limited else "–",
        )
    console.print(table)


def _bytes(mib: int | None) -> int | None:
    return None if mib is None else mib * _MIB


def _found(folder: Path, admin: str) -> PolicyList:
    from quire_tools.cli.cluster import as_operator

    books: list[PolicyList] = []

    async def work(operator: AdminClient) -> None:
        books.append(await operator.policies())

    as_operator(folder, admin, work)
    return books[0]
