"""The commands, in one place; their work is in modules of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from quire import __version__
from quire.model.errors import InvalidRequest, NodeUnavailable, QuireError
from quire_tools.cli.bench_app import GROUPS, load_commands
from quire_tools.cli.cache_app import cache_app
from quire_tools.cli.images_app import images_app
from quire_tools.cli.keys import keys_app
from quire_tools.cli.options import FOLDER, Admin, AsJson, Folder, Gateway, Json, Plot, numbers, salt_of
from quire_tools.cli.policies import policy_app, tenant_app

_ABOUT = "Keeps KV caches and latents as small immutable objects, and delivers them as they are needed."
_RUN, _WATCH, _OPERATE = "Run a cluster", "Watch it", "Operate it"
_CONTENTS, _MEASURE = "What it stores", "Plan and measure"
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=_ABOUT)
app.add_typer(cache_app, name="cache", rich_help_panel=_CONTENTS)
app.add_typer(images_app, name="images", rich_help_panel=_CONTENTS)
app.add_typer(keys_app, name="keys", rich_help_panel=_OPERATE)
app.add_typer(policy_app, name="policy", rich_help_panel=_OPERATE)
app.add_typer(tenant_app, name="tenant", rich_help_panel=_OPERATE)
for name, group_app in GROUPS.items():
    app.add_typer(group_app, name=name, rich_help_panel=_MEASURE)


_ENGINE = "URL[,host=NAME][,events=tcp://HOST:PORT]: an engine, its machine, its KV events; can be repeated"


@app.command(rich_help_panel=_RUN)
def version(as_json: AsJson = False) -> None:
    """Version of Quire and of the UCX in use."""
    about = {"quire": __version__, "ucx": "", "ucx_path": "", "ucx_origin": ""}
    try:
        from pyucx import library
    except ImportError as error:
        print(json.dumps(about, indent=2) if as_json else f"quire {__version__}, no UCX: {error}")
        return
    ucx = ".".join(map(str, library.version))
    about |= {"ucx": ucx, "ucx_path": str(library.path), "ucx_origin": library.origin}
    if as_json:
        print(json.dumps(about, indent=2))
    else:
        print(f"quire {__version__}, UCX {ucx} from {library.path} ({library.origin})")


@app.command(rich_help_panel=_RUN)
def up(
    folder: Folder = FOLDER,
    storage_nodes: Annotated[int, typer.Option(help="storage services")] = 1,
    arena_mib: Annotated[int, typer.Option(help="memory of each storage node for chunks, MiB")] = 1024,
    drive_mib: Annotated[int, typer.Option(help="drive space of each storage node, MiB, taken at once")] = 4096,
    decoders: Annotated[
        int | None,
        typer.Option(help="services that decode images; if not given one, where its packages are installed", min=0),
    ] = None,
    models: Annotated[Path | None, typer.Option(help="a VAE's folder, a pipeline's, or a folder of these")] = None,
    port: Annotated[
        int, typer.Option(help="of the gateway for gRPC; if not given 7410, where it is free", min=0, max=65535)
    ] = 0,
    http: Annotated[
        str, typer.Option(help="port, or host:port, of images over HTTP; if not given 7480, where it is free")
    ] = "",
    trace: Annotated[bool, typer.Option(help="write traces, for `quire trace`")] = False,
) -> None:
    """Start a cluster on this machine and keep it running until Ctrl-C. Services that end are started again."""
    from quire_tools.cli import cluster as cluster_commands
    from quire_tools.local import LocalCluster, ports

    cluster_commands.up(
        LocalCluster(
            folder,
            storage_nodes=storage_nodes,
            decoders=cluster_commands.count_decoders(decoders),
            arena_bytes=arena_mib << 20,
            drive_bytes=drive_mib << 20,
            http_address=f"127.0.0.1:{http}" if http.isdigit() else http,
            settings=cluster_commands.decoder_settings(models) if models is not None else {},
            trace=trace,
            usual_ports=ports.usual(),
            gateway_port=port,
        )
    )


@app.command(rich_help_panel=_RUN)
def certs(
    folder: Annotated[Path, typer.Argument(help="where they go; an authority that is there is kept")] = Path("certs"),
    host: Annotated[list[str] | None, typer.Option(help="name or address under which clients reach a gateway")] = None,
    days: Annotated[int, typer.Option(help="how long they are valid")] = 90,
    trust: Annotated[
        list[Path] | None, typer.Option(help="another authority's ca.pem: trusted, too, while one replaces the other")
    ] = None,
) -> None:
    """A private authority, and certificates for members and gateways. Again: new ones, taken up without a restart."""
    from quire.wire.tls import OPERATOR, SERVICES
    from quire_server.access.certs import make

    certificates = make(folder, host or [], days, trust or [])
    operator = certificates.members[OPERATOR]
    print(f"# every service\nQUIRE_CLUSTER_CA={certificates.ca}")
    for name in SERVICES:
        pair = certificates.members[name]
        print(f"# {name}\nQUIRE_CLUSTER_CERT={pair.cert}\nQUIRE_CLUSTER_KEY={pair.key}")
        if name == "gateway":
            print(f"QUIRE_GATEWAY_TLS_CERT={certificates.public.cert}\nQUIRE_GATEWAY_TLS_KEY={certificates.public.key}")
    print(f"# operators; clients need the first alone\nQUIRE_CLIENT_CA={certificates.ca}")
    print(f"QUIRE_CLIENT_CERT={operator.cert}\nQUIRE_CLIENT_KEY={operator.key}")


@app.command(rich_help_panel=_WATCH)
def status(
    folder: Folder = FOLDER,
    gateway: Gateway = "",
    admin: Admin = "",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="every figure of every member, too")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the members of the cluster, their contents, and problems."""
    from quire_tools.cli.views.status import status as show

    show(folder, gateway, admin, verbose=verbose, as_json=as_json)


@app.command(rich_help_panel=_WATCH)
def health(
    folder: Folder = FOLDER,
    gateway: Gateway = "",
    admin: Admin = "",
    timeout_s: Annotated[float, typer.Option(help="seconds within which the cluster has to answer", min=0.1)] = 2.0,
    as_json: AsJson = False,
) -> None:
    """OK, WARN or ERR, with what to do. The exit status is 0, 1 or 2."""
    from quire_tools.cli.views.health import health as show

    raise typer.Exit(show(folder, gateway, admin, timeout_s, as_json=as_json).value)


@app.command("support-bundle", rich_help_panel=_WATCH)
def support_bundle(
    file: Annotated[
        Path | None, typer.Argument(help="where it goes (.tar.gz); if not given, a name with the time, here")
    ] = None,
    folder: Folder = FOLDER,
    gateway: Gateway = "",
    admin: Admin = "",
    timeout_s: Annotated[float, typer.Option(help="seconds within which the cluster has to answer", min=0.1)] = 5.0,
) -> None:
    """Write one file for a report: health, status, machine; of a cluster here also settings and logs. No secrets."""
    from quire_tools.cli.support import support_bundle as write

    write(file, folder, gateway, admin, timeout_s)


Storage = Annotated[str, typer.Argument(help="name of a storage node, as `quire status` shows it")]
StalledS = Annotated[
    float, typer.Option(help="give up when no chunk was copied for so many seconds; the cluster goes on", min=1.0)
]


@app.command(rich_help_panel=_OPERATE)
def drain(
    node: Storage,
    undo: Annotated[bool, typer.Option("--undo", help="it takes stores again, also if it was decommissioned")] = False,
    wait: Annotated[bool, typer.Option(help="wait until others have all of its chunks, with progress")] = True,
    stalled_s: StalledS = 300.0,
    folder: Folder = FOLDER,
    admin: Admin = "",
) -> None:
    """Copy a storage node's chunks to other nodes, while it is read from. Again: continue watching."""
    from quire_tools.cli import storage_nodes

    if undo:
        storage_nodes.undo(folder, admin, node)
    else:
        storage_nodes.drain(folder, admin, node, wait=wait, stalled_s=stalled_s)


@app.command(rich_help_panel=_OPERATE)
def decommission(
    node: Storage,
    lose_chunks: Annotated[
        bool, typer.Option("--lose-chunks", help="do not wait: give up what no other node has; for a node that is gone")
    ] = False,
    stalled_s: StalledS = 300.0,
    folder: Folder = FOLDER,
    admin: Admin = "",
) -> None:
    """Drain a storage node, then take it out of use: once this has ended, it can be stopped for good."""
    from quire_tools.cli import storage_nodes

    storage_nodes.decommission(folder, admin, node, lose_chunks=lose_chunks, stalled_s=stalled_s)


@app.command("safe-to-remove", rich_help_panel=_OPERATE)
def safe_to_remove(node: Storage, folder: Folder = FOLDER, admin: Admin = "", as_json: AsJson = False) -> None:
    """Whether a storage node can be stopped for good, without losing a chunk. Status 1 if not, with the reason."""
    from quire_tools.cli import storage_nodes

    if not storage_nodes.is_safe_to_remove(folder, admin, node, as_json=as_json):
        raise typer.Exit(1)


@app.command(rich_help_panel=_RUN)
def router(
    engine: Annotated[list[str] | None, typer.Option(help=_ENGINE)] = None,
    prefill: Annotated[list[str] | None, typer.Option(help="an engine that computes prompts for --decode")] = None,
    decode: Annotated[list[str] | None, typer.Option(help="an engine that answers what --prefill computes")] = None,
    gateway: Annotated[str, typer.Option(help="host:port of Quire's gateway; empty: choose without Quire")] = "",
    listen: Annotated[str, typer.Option(help="host:port to serve at")] = "127.0.0.1:8080",
    token: Annotated[str, typer.Option(envvar="QUIRE_TOKEN", help="for the gateway")] = "",
    tenant_salt: Annotated[
        str, typer.Option(envvar="QUIRE_ROUTER_TENANT_SALT", help="of the engines, hexadecimal")
    ] = "",
    engine_key: Annotated[
        str, typer.Option(envvar="QUIRE_ROUTER_ENGINE_KEY", help="API key for the router's own requests to engines")
    ] = "",
    retries: Annotated[int, typer.Option(help="further engines that are tried before the first token")] = 2,
    prefill_min: Annotated[
        int, typer.Option(help="tokens left to compute below which a decode engine computes a prompt itself")
    ] = 256,
    tokens_per_s: Annotated[float, typer.Option(help="prefill rate of an engine until it is measured")] = 4000.0,
    health_s: Annotated[float, typer.Option(help="seconds between two probes of an engine")] = 2.0,
    down_after_s: Annotated[float, typer.Option(help="seconds without a sign of life after which it is down")] = 10.0,
) -> None:
    """An OpenAI server in front of engines: each request goes to the one that is expected to answer it first."""
    from quire_tools.router.server import run as serve
    from quire_tools.router.settings import RouterSettings, addresses

    serve(
        RouterSettings(
            listen=listen,
            engines=addresses(engine or [], prefill or [], decode or []),
            gateway=gateway,
            token=token,
            tenant_salt=salt_of(tenant_salt),
            engine_key=engine_key,
            retries=retries,
            prefill_tokens_min=prefill_min,
            tokens_per_s=tokens_per_s,
            health_s=health_s,
            down_after_s=down_after_s,
        )
    )


@app.command(rich_help_panel=_WATCH)
def page(folder: Folder = FOLDER) -> None:
    """The address, user and password of the web page; with QUIRE_CLUSTER_SECRET the password alone."""
    from quire_tools.cli import cluster as cluster_commands

    cluster_commands.page(folder)


@app.command(rich_help_panel=_RUN)
def doctor(
    drives: Annotated[list[Path] | None, typer.Option(help="a folder that is to hold chunks; can be repeated")] = None,
    redis: Annotated[str, typer.Option(envvar="QUIRE_REDIS_URL", help="Redis to look at; empty for none")] = "",
    as_json: AsJson = False,
) -> None:
    """Check what keeps Quire from working, from being safe, or from being fast on this machine.

    Status 1 if something is broken.
    """
    from quire_tools.cli.doctor import doctor as look

    if not look(drives or [], redis, as_json=as_json):
        raise typer.Exit(1)


@app.command(rich_help_panel=_WATCH)
def top(
    folder: Folder = FOLDER,
    gateway: Gateway = "",
    admin: Admin = "",
    interval_s: Annotated[float, typer.Option(help="seconds between two looks")] = 1.0,
    rounds: Annotated[int, typer.Option(help="how often to draw; 0 for ever")] = 0,
) -> None:
    """The cluster as it works: rates, hits, links, caches. Ctrl-C ends it."""
    from quire_tools.cli.views.top import top as show

    show(folder, gateway, admin, interval_s, rounds)


@app.command(rich_help_panel=_WATCH)
def trace(
    trace_id: Annotated[
        str, typer.Argument(metavar="[ID]", help="a trace, or how its id begins; none: the latest")
    ] = "",
    folder: Annotated[Path, typer.Option(help="with spans: QUIRE_TRACE_FOLDER")] = FOLDER / "traces",
    admin: Annotated[
        str,
        typer.Option(help="a cluster's admin frontend instead, by QUIRE_CLUSTER_SECRET: what QUIRE_TRACE_RECENT keeps"),
    ] = "",
    limit: Annotated[int, typer.Option(help="how many to list")] = 20,
    as_json: AsJson = False,
) -> None:
    """A request's way through the services, as a waterfall."""
    from quire_tools.cli.views import trace as traces

    trace_ = traces.of_cluster(admin, trace_id) if admin else traces.of_folder(folder)
    traces.show(trace_, trace_id, limit, as_json=as_json)


@app.command(rich_help_panel=_MEASURE)
def profile(
    out: Annotated[Path, typer.Option(help="file to write (JSON); put it into QUIRE_PROFILES")],
    model: Annotated[str, typer.Option(help="folder or name of a transformers model; empty for the demo's")] = "",
    name: Annotated[str, typer.Option(help="model under which look-ups find it; empty: as given")] = "",
    device: Annotated[str, typer.Option(help="device under which look-ups find it; empty: this machine's")] = "",
    inputs: Annotated[str, typer.Option(help="input lengths in tokens, separated by commas")] = "16,64,256,1024",
    prefixes: Annotated[str, typer.Option(help="prefix lengths in tokens, separated by commas")] = "0,512,2048,4096",
    rounds: Annotated[int, typer.Option(help="rounds of each measurement")] = 3,
) -> None:
    """Measure how long a model prefills, by input length × prefix length, on CUDA if there is one, else on the CPU."""
    from quire_tools.cli.profile import measure

    measure(
        out,
        model,
        name=name,
        device=device,
        inputs=numbers(inputs, int),
        prefixes=numbers(prefixes, int),
        rounds=rounds,
    )


@app.command(rich_help_panel=_MEASURE)
def calibrate(
    folder: Folder = FOLDER,
    gateway: Gateway = "",
    model: Annotated[str, typer.Option(help="of the compute profile")] = "Llama-3.1-8B",
    device: Annotated[str, typer.Option(help="of the compute profile")] = "a100-80gb",
    profiles: Annotated[Path | None, typer.Option(help="folder with compute profiles of your own")] = None,
    chunk_tokens: Annotated[int, typer.Option(help="tokens of a chunk")] = 16,
    kv_heads: Annotated[int, typer.Option(help="KV heads of the layout")] = 8,
    head_dim: Annotated[int, typer.Option(help="size of a head")] = 128,
    hit: Annotated[float, typer.Option(help="cached share of the prompts")] = 0.5,
    payload_mib: Annotated[int, typer.Option(help="largest payload to try")] = 256,
    rounds: Annotated[int, typer.Option(help="rounds of each measurement")] = 5,
    tier: Annotated[str, typer.Option(help="where the chunks are: memory, or object")] = "memory",
    admin: Admin = "",
    keep: Annotated[bool, typer.Option("--keep", help="measure only, do not set the cluster's threshold")] = False,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Measure both delivery modes on a running cluster and set its threshold Θ (ObjectCache, Eq. 2)."""
    from quire.model.layout import Dtype, KvLayout
    from quire.model.profile import Profiles
    from quire_tools import calibrate as bench
    from quire_tools.cli import cluster as cluster_commands

    measured = Profiles(profiles).find(model, device)
    if measured is None:
        raise InvalidRequest(
            f"there is no profile of {model!r} on {device!r}; `quire profile` makes one", field="device"
        )
    layout = KvLayout(measured.num_layers, chunk_tokens, kv_heads, head_dim, Dtype.BF16)
    address = cluster_commands.gateway_of(folder, gateway)
    cold = tier == "object"
    if not cold and tier != "memory":
        raise InvalidRequest(f"{tier!r}: memory, or object", field="tier")
    report, theta = bench.run(address, layout, measured, hit, payload_mib << 20, rounds, object_tier=cold)
    if keep:
        report.notes.append(f"Θ would be {theta} bytes ({theta / 2**20:g} MiB); nothing was changed")
    else:
        cluster_commands.as_operator(folder, admin, lambda operator: operator.set_theta(theta, object_tier=cold))
        report.notes.append(f"Θ of the cluster is now {theta} bytes ({theta / 2**20:g} MiB)")
    report.show(json_file, plot, draw=lambda path: bench.draw(report, path))


@app.command(rich_help_panel=_RUN)
def demo(
    folder: Annotated[Path, typer.Option(help="where the trace and the picture go")] = Path("quire-demo"),
    gateway: Annotated[str, typer.Option(help="host:port of a running cluster's gateway; empty: start a new one")] = "",
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="seconds in which a process may do nothing, or a request may take", min=1)
    ] = 60.0,
) -> None:
    """A real model reuses a prefix that another process computed; then a storage node dies."""
    from quire_tools.cli.demos.kv import Demo

    Demo(folder, gateway, timeout_s=timeout_s).run()


@app.command("demo-vllm", rich_help_panel=_RUN)
def demo_vllm(
    folder: Annotated[Path, typer.Option(help="where the model and the logs go")] = Path("quire-demo-vllm"),
) -> None:
    """Engines share a prefix, one prefills for another; a node and an engine die (`make demo-vllm` installs vLLM)."""
    from quire_tools.cli.demos.vllm import DemoVllm

    DemoVllm(folder).run()


def run() -> None:
    """Run the commands. A `QuireError` is one line and status 1, no stack trace."""
    try:
        for group in GROUPS.keys() & sys.argv[1:2]:
            load_commands(group, sys.argv[2:])
        app()
    except QuireError as error:
        advice = "; does it run, and is that its address?" if _is_away(error) else ""
        Console(stderr=True).print(f"[bold red]{error.code()}[/]: {escape(str(error))}{advice}", soft_wrap=True)
        sys.exit(1)


def _is_away(error: QuireError) -> bool:
    """Whether no gateway has answered."""
    return isinstance(error, NodeUnavailable) and not error.answered


__all__ = ["app", "run"]
