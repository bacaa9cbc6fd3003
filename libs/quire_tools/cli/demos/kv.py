"""`quire demo`: one process computes a prefix, another reuses it; then a storage node dies under a request.

The model is a Llama of a few million random weights, by seed: its compute is real, its words are not. The tokens are
the bytes of the source files of Quire itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from opentelemetry.trace import get_current_span
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import quire.model
from quire.client import Client
from quire.integrations.transformers import Prefill, PrefixCache
from quire.model.errors import DeadlineExceeded, Unavailable
from quire.model.hashing import block_keys
from quire.telemetry import tracer
from quire.transport import OFF
from quire_server.telemetry import configure
from quire_tools.cli.cluster import write_namespace
from quire_tools.cli.views import timeline
from quire_tools.local import LocalCluster
from quire_tools.local.patience import Patience
from quire_tools.spans import lines_of, read_traces

_PREFIX_TOKENS: Final = 3000
_SUFFIX_TOKENS: Final = 192
_LINK_BYTES_PER_S: Final = 400_000_000
_MODEL_ID: Final = "quire-demo-llama"
console = Console(highlight=False)


def demo_model() -> Any:
    """A Llama with grouped-query attention, 8 layers, byte vocabulary; weights by seed."""
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1536,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config).eval()


def demo_prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts with the same first 3,000 tokens: a source file each, behind shared ones. (1, tokens) bytes."""
    folder = Path(quire.model.__file__).parent
    shared = (folder / "hashing.py").read_bytes() + (folder / "descriptor.py").read_bytes()
    endings = [(folder / name).read_bytes()[:_SUFFIX_TOKENS] for name in ("layout.py", "lease.py")]
    first, second = (torch.tensor([list(shared[:_PREFIX_TOKENS] + ending)]) for ending in endings)
    return first, second


def compute_first_prompt(gateway: str, salt: str) -> None:
    """Run in the other process: prefill the first prompt and store its chunks. `salt`: hex, the same in both."""
    configure("demo-producer")
    model, (first, _) = demo_model(), demo_prompts()
    with Client(gateway) as client, tracer().start_as_current_span("demo.producer"):
        cache = PrefixCache(model, client, model_id=_MODEL_ID, tenant_salt=bytes.fromhex(salt))
        result = cache.prefill(first)
        stored = result.wait_stored()
        print(
            json.dumps({"ttft_s": result.ttft_s, "stored": stored, "reused": result.reused_tokens}),
            flush=True,
        )


_LOOK_S: Final = 0.1
_ABOUT: Final = (
    "A model answers a prompt whose first 3,000 tokens another process has computed; a storage node is killed in the "
    "middle of a delivery; six pictures come back from their latents."
)


class _Request(NamedTuple):
    """The request that reused a prefix. `began_ns`: Unix time."""

    result: Prefill
    began_ns: int
    trace_id: str


class Demo:
    """The whole demonstration. `gateway`: a running cluster; empty starts one of its own, which can be hurt.

    `timeout_s`: time in which a process that is waited for may do nothing, and limit of a request.
    """

    def __init__(self, folder: Path, gateway: str, *, timeout_s: float = 60.0) -> None:
        self._folder = folder
        self._gateway = gateway
        self._timeout_s = timeout_s
        self._summary: list[tuple[str, str]] = []
        # A namespace of its own for each run: one that ran before must not have left the answer in the store.
        self._salt = os.urandom(16)

    def run(self) -> None:
        """Run the demo. Raises `QuireError` when the cluster does not work, `SystemExit` when the logits are wrong."""
        self._folder.mkdir(parents=True, exist_ok=True)
        console.print(_ABOUT)
        if self._gateway:
            self._tell(self._gateway, None)
            self._sum_up()
            return
        settings = {
            "QUIRE_SCHEDULER_LINKS": f"default={_LINK_BYTES_PER_S}",
            "QUIRE_SHARED_MEMORY": OFF,  # it would use no link
            "QUIRE_DECODER_CACHE_BYTES": str(256 << 10),
        }
        cluster = LocalCluster(
            self._folder / "cluster",
            storage_nodes=2,
            decoders=1,
            arena_bytes=256 << 20,
            drive_bytes=1 << 30,
            trace=True,
            settings=settings,
        )
        with _step("starting the cluster: redis, orchestrator, gateway, scheduler, decoder, 2 × storage"):
            cluster.start(self._timeout_s)
        try:
            self._tell(cluster.gateway_address, cluster)
        finally:
            with _step("stopping the cluster"):
                cluster.stop()
        self._sum_up()

    def _sum_up(self) -> None:
        """Print the results, on one screen."""
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="bold")
        table.add_column()
        for name, text in self._summary:
            table.add_row(name, text)
        console.print()
        console.print(table)

    def _tell(self, gateway: str, cluster: LocalCluster | None) -> None:
        traces = self._folder / "cluster" / "traces"
        if cluster is not None:
            _trace_into(traces)
        configure("demo-consumer", log_level="error")
        with _step("another process computes the first prompt and stores its prefix"):
            producer = self._produce(gateway)
        computed = _PREFIX_TOKENS + _SUFFIX_TOKENS - producer["reused"]
        console.print(f"  {computed} tokens in {producer['ttft_s']:.2f} s; {producer['stored']} chunks stored")
        with Client(gateway, timeout_s=self._timeout_s) as client:
            model, (first, second) = demo_model(), demo_prompts()
            cache = PrefixCache(model, client, model_id=_MODEL_ID, tenant_salt=self._salt)
            write_namespace(self._folder / "namespace.json", cache.namespace)
            request = self._reuse(cache, model, first, second)
            if cluster is not None:
                self._lose_a_node(client, cache, cluster, second)
            cache.close()
        self._show_images(gateway, shifting=cluster is not None)
        trace = read_traces(lines_of(traces)).get(request.trace_id)  # none of a cluster that was there before
        picture = self._folder / "timeline.png"
        timeline.draw(picture, request.result, timeline.sent_layers(trace, request.began_ns))
        self._summary.append(("timeline", f"{picture}: each layer as it was read, sent, and computed with"))
        if cluster is not None:
            spans = self._folder / "trace.jsonl"
            spans.write_text("".join(path.read_text() for path in sorted(traces.glob("*.jsonl"))))
            self._summary.append(("traces", f"{spans}, a span a line"))
        self._summary.append(("next", "quire up, and the README's examples for your engine"))

    def _show_images(self, gateway: str, *, shifting: bool) -> None:
        from quire_tools.cli.demos.images import show_images

        with _step("images: encoding pictures into latents, storing them, getting them back"):
            self._summary += show_images(gateway, self._folder, shifting=shifting)

    def _produce(self, gateway: str) -> dict[str, Any]:
        command = [
            sys.executable,
            "-c",
            f"from quire_tools.cli.demos.kv import compute_first_prompt as go; go({gateway!r}, {self._salt.hex()!r})",
        ]
        log = self._folder / "producer.log"
        with (
            log.open("w") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        ):
            patience = Patience(self._timeout_s, process.pid)
            while process.poll() is None and not patience.is_over:
                time.sleep(_LOOK_S)
            if process.poll() is None:
                process.kill()
                limit = f"the limit is {self._timeout_s:g} s in which it does nothing (--timeout)"
                raise DeadlineExceeded(f"the producer is not done after {patience.waited_s:.0f} s; {limit}; see {log}")
            assert process.stdout is not None, "it is a pipe"
            lines = process.stdout.read().splitlines()
        if process.returncode != 0:
            raise Unavailable(f"the producer ended with status {process.returncode}; see {log}")
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer

    def _reuse(self, cache: PrefixCache, model: Any, first: torch.Tensor, second: torch.Tensor) -> _Request:
        with _step("the second prompt, recomputed in full"):
            cache.prefill(second[:, :64], reuse=False, store=False)
            recomputed = cache.prefill(second, reuse=False, store=False)
        with (
            _step("the second prompt, with the prefix from Quire"),
            tracer().start_as_current_span("demo.reuse"),
        ):
            began_ns, trace_id = time.time_ns(), format(get_current_span().get_span_context().trace_id, "032x")
            reused = cache.prefill(second)
            reused.wait_stored()
        with _step("the second prompt, with the same prefix kept in this process's memory"):
            expected = _logits_from_memory(model, first, second, reused.reused_tokens)
        self._report(recomputed, reused)
        identical = torch.equal(expected, reused.logits)
        tail = recomputed.logits[:, -reused.computed_tokens :]
        difference = float((tail - reused.logits).abs().max())
        same = bool((tail.argmax(-1) == reused.logits.argmax(-1)).all())
        self._summary.append(
            ("logits", f"bit-identical to the KV kept in memory: {'yes' if identical else 'NO'}; same tokens: {same}")
        )
        if not (identical and same):
            raise SystemExit(f"the logits are wrong: they differ from a full recompute by up to {difference:.1e}")
        return _Request(reused, began_ns, trace_id)

    def _report(self, recomputed: Prefill, reused: Prefill) -> None:
        waited_ms = 1e3 * sum(times.stall_s for times in reused.layers)
        comparison = f"{recomputed.ttft_s * 1e3:.0f} ms computed, {reused.ttft_s * 1e3:.0f} ms with Quire"
        part = f"{reused.reused_tokens} of {recomputed.computed_tokens} from Quire"
        size = f"{reused.bytes_delivered / 2**20:.1f} MiB"
        self._summary += [
            ("first token", f"{comparison}: {recomputed.ttft_s / reused.ttft_s:.1f}× faster"),
            ("tokens", f"{part}, {size}; {waited_ms:.0f} ms waited for layers"),
        ]

    def _lose_a_node(self, client: Client, cache: PrefixCache, cluster: LocalCluster, second: torch.Tensor) -> None:
        keys = block_keys(cache.namespace, second[0].tolist())
        victim = client.lookup(cache.namespace, keys, lease_ttl_ms=0).ranges[0].node_id
        # Frozen first, so that the request is surely under way when the node dies.
        cluster.kill(victim, signal.SIGSTOP)
        killer = threading.Timer(0.3, lambda: cluster.kill(victim, signal.SIGKILL))
        with (
            _step(f"{victim} is killed in the middle of a delivery"),
            tracer().start_as_current_span("demo.loss"),
        ):
            killer.start()
            survived = cache.prefill(second, store=False)
            killer.join()
        error = survived.failure.partition(":")[0]
        self._summary.append(
            (
                "a killed node",
                f"the request finished all the same: {survived.reused_tokens} tokens reused, "
                f"{survived.computed_tokens} computed, {survived.ttft_s * 1e3:.0f} ms ({error})",
            )
        )
        if not survived.failure:
            raise SystemExit("the node's death went unnoticed")


def _logits_from_memory(model: Any, first: torch.Tensor, second: torch.Tensor, prefix: int) -> torch.Tensor:
    """The second prompt's logits behind a prefix of the first prompt's KV that never left this process."""
    with torch.inference_mode():
        cache = model(first, use_cache=True).past_key_values
        memory = DynamicCache()
        for index, layer in enumerate(cache.layers):
            memory.update(layer.keys[:, :, :prefix].clone(), layer.values[:, :, :prefix].clone(), index)
        logits: torch.Tensor = model(second[:, prefix:], past_key_values=memory, use_cache=True).logits
    return logits


def _trace_into(folder: Path) -> None:
    os.environ["QUIRE_TRACE_FOLDER"] = str(folder)


@contextmanager
def _step(text: str) -> Iterator[None]:
    """A line with a spinner while it happens; then whether it succeeded, and how long it took."""
    started = time.monotonic()
    try:
        with console.status(text):
            yield
    except BaseException:
        console.print(f"[red]✗[/] {text} ({time.monotonic() - started:.1f} s)")
        raise
    console.print(f"[green]✓[/] {text} ({time.monotonic() - started:.1f} s)")
