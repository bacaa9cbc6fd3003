"""`quire keys`: access keys for the frontends, made by who knows the cluster's Redis and its secret."""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from quire.model.errors import InvalidRequest
from quire_tools.cli.options import FOLDER, AsJson, Folder

if TYPE_CHECKING:
    from quire_server.redis import AccessKeys
    from quire_server.redis.keys.access import AccessGrant, AccessKey

Result = TypeVar("Result")
console = Console()
keys_app = typer.Typer(no_args_is_help=True, help="Access keys for the frontends.")
_GRANT_HELP = "TENANT/BUCKET:read|write|admin, or TENANT/BUCKET/PREFIX:..."


@keys_app.command()
def create(
    tenant: Annotated[str, typer.Argument(help="whose key: it may do everything with its tenant's own buckets")],
    grant: Annotated[list[str] | None, typer.Option(help=_GRANT_HELP)] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="own buckets too are only read")] = False,
    rdma: Annotated[bool, typer.Option("--rdma", help="may name memory for RDMA; only for clients you trust")] = False,
    days: Annotated[float, typer.Option(help="until the key expires; 0: never", min=0)] = 0.0,
    folder: Folder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Make a key; prints its secret, which is kept nowhere."""
    grants = tuple(parse_grant(text) for text in grant or [])
    expires_ms = round((time.time() + days * 86_400) * 1000) if days else 0
    key, secret, salt = _run(
        folder,
        lambda keys: _with_secret(
            keys, keys.create(tenant, grants, read_only=read_only, rdma=rdma, expires_ms=expires_ms)
        ),
        "CreateKey",
        lambda result: f"{result[0].name} of {tenant}",
    )
    _print_key(key, secret, salt, as_json=as_json)


@keys_app.command()
def rotate(
    name: Annotated[str, typer.Argument(help="name of the key")],
    folder: Folder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Give a key another secret; the one before is worth nothing from then on."""
    key, secret, salt = _run(folder, lambda keys: _with_secret(keys, keys.rotate(name)), "RotateKey", lambda _: name)
    _print_key(key, secret, salt, as_json=as_json)


def _print_key(key: AccessKey, secret: str, salt: str, *, as_json: bool) -> None:
    """Print everything that its holder needs."""
    token = f"{key.name}:{secret}"
    if as_json:
        about = {"access_key": key.name, "secret_key": secret, "tenant": key.tenant, "token": token, "salt": salt}
        print(json.dumps(about, indent=2))
        return
    console.print(f"access key  {key.name}\nsecret key  {secret}\ntenant      {key.tenant}", highlight=False)
    console.print(f"gRPC token  {token}\nsalt        {salt}", highlight=False, soft_wrap=True)


@keys_app.command("grant")
def add_grant(
    name: Annotated[str, typer.Argument(help="name of the key")],
    grant: Annotated[str, typer.Argument(help=_GRANT_HELP)],
    folder: Folder = FOLDER,
) -> None:
    """Let a key do something in another tenant's bucket, in quire/quire-kv/NAMESPACE/ or in quire/quire-latents."""
    key = _run(
        folder,
        lambda keys: keys.grant(name, parse_grant(grant)),
        "GrantKey",
        lambda key: f"{name}: {grant}" if key is not None else "",
    )
    if key is None:
        raise InvalidRequest(f"there is no key {name!r}", field="key")
    console.print(f"{name}: {len(key.grants)} grants")


@keys_app.command()
def namespace(
    file: Annotated[Path, typer.Argument(help="the namespace, as JSON (the demo writes one)")],
) -> None:
    """Print the 32 digits by which grants, policies and cache events name a namespace."""
    from quire_tools.cli.cluster import read_namespace

    print(read_namespace(file).tag.hex())


@keys_app.command()
def rm(
    name: Annotated[str, typer.Argument(help="name of the key")],
    folder: Folder = FOLDER,
) -> None:
    """Delete a key."""
    existed = _run(folder, lambda keys: keys.delete(name), "DeleteKey", lambda existed: name if existed else "")
    console.print(f"{name}: {'deleted' if existed else 'there was none'}")


@keys_app.command()
def ls(folder: Folder = FOLDER, as_json: AsJson = False) -> None:
    """List the keys, without secrets."""
    keys_ = _run(folder, lambda keys: keys.all())
    if as_json:
        rows = [
            {
                "key": key.name,
                "tenant": key.tenant,
                "read_only": key.read_only,
                "grants": _grants(key),
                "generation": key.generation,
                "expires_ms": key.expires_ms,
            }
            for key in keys_
        ]
        print(json.dumps(rows, indent=2))
        return
    table = Table("key", "tenant", "own buckets", "grants", "generation", "expires")
    for key in keys_:
        grants = ", ".join(_grants(key))
        table.add_row(
            key.name, key.tenant, "read" if key.read_only else "all", grants or "–", str(key.generation), _day(key)
        )
    console.print(table)


def _day(key: AccessKey) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(key.expires_ms / 1000)) if key.expires_ms else "–"


def _grants(key: AccessKey) -> list[str]:
    return [f"{grant.tenant}/{grant.bucket}/{grant.prefix}:{grant.level.name.lower()}" for grant in key.grants]


def parse_grant(text: str) -> AccessGrant:
    """TENANT/BUCKET[/PREFIX]:read|write|admin. Raises `InvalidRequest`."""
    from quire_server.redis.keys.access import AccessGrant, AccessLevel

    place, _, level = text.rpartition(":")
    tenant, _, rest = place.partition("/")
    bucket, _, prefix = rest.partition("/")
    if not tenant or not bucket or level.upper() not in AccessLevel.__members__:
        raise InvalidRequest(f"{text!r} is not TENANT/BUCKET[/PREFIX]:read|write|admin", field="grant")
    return AccessGrant(tenant, bucket, prefix, AccessLevel[level.upper()])


async def _with_secret(keys: AccessKeys, making: Awaitable[AccessKey | None]) -> tuple[AccessKey, str, str]:
    key = await making
    if key is None:
        raise InvalidRequest("there is no such key", field="key")
    return key, keys.secret(key), keys.salt(key.tenant).hex()


def _operator() -> str:
    """Return the user and host of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in a container
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _run(
    folder: Path,
    action: Callable[[AccessKeys], Awaitable[Result]],
    act: str = "",
    subject_of: Callable[[Result], str] = str,
) -> Result:
    """Act on the Redis and the secret of the environment, else of the cluster that runs on `folder`.

    `act`: for the gateways' audit log, with its object of the result; an empty object is none.
    """
    import asyncio

    from quire_server.config import value_of
    from quire_server.redis import AccessKeys, Acts, connect
    from quire_tools.local import read_state

    url, secret = value_of("QUIRE_REDIS_URL", os.environ), value_of("QUIRE_CLUSTER_SECRET", os.environ)
    if not url or not secret:
        url, secret = str(read_state(folder)["redis"]), (folder / "secret").read_text()

    async def run() -> Result:
        client = connect(url)
        try:
            result = await action(AccessKeys(client, secret.encode()))
            if act and (subject := subject_of(result)):
                await Acts(client).record(act, subject, _operator())
            return result
        finally:
            await client.aclose()

    return asyncio.run(run())
