"""vLLM as people run it: the OpenAI server, its engine and its worker in processes of their own."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire_tools.engines.server import EngineServer, engine_server
from quire_tools.local import LocalCluster
from tests.engines.engine import BLOCK, PROMPT, engine
from tests.polling import until

WHOLE = (len(PROMPT) - 1) // BLOCK * BLOCK


@contextmanager
def _server(model: Path, gateway: str, log: Path, *more: str, role: str = "kv_both", **extra: Any) -> Iterator[_Server]:
    with engine_server(model, log, *more, gateway=gateway, role=role, **extra) as server:
        server.ready()
        yield _Server(server)


class _Server:
    """A server, and the requests of these tests."""

    def __init__(self, server: EngineServer) -> None:
        self.figure, self.kill = server.figure, server.kill
        self._complete = server.complete

    def tokens(self, prompt: list[int], parameters: dict[str, Any] | None = None) -> tuple[list[int], int]:
        """The next eight, and how many of the prompt's were cached. `parameters`: of another engine's hand-over."""
        response = self._complete(prompt, 8, parameters)
        details = response["usage"].get("prompt_tokens_details") or {}
        return response["choices"][0]["token_ids"], details.get("cached_tokens") or 0

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Send the request of a proxy, and return the parameters for the decode engine."""
        addresses = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        response = self._complete(prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False, **addresses})
        parameters: dict[str, Any] = response["kv_transfer_params"]
        return parameters


def test_the_server_takes_what_another_engine_has_stored(
    tiny_model: Path, engine_cluster: LocalCluster, tmp_path: Path
) -> None:
    with engine(tiny_model, engine_cluster.gateway_address, prefix_caching_hash_algo="sha256_cbor") as here:
        expected, _ = here.tokens(PROMPT)
        until(lambda: here.figures().get("stored_blocks", 0) > 0, "stored")
    with _server(tiny_model, engine_cluster.gateway_address, tmp_path / "log") as server:
        assert server.tokens(PROMPT) == (expected, WHOLE)
        until(lambda: server.figure("loaded_blocks") == WHOLE // BLOCK, "Prometheus has it")
        assert server.figure("failed_blocks") == 0


def test_one_engine_computes_a_prompt_and_another_one_decodes(
    tiny_model: Path, engine_cluster: LocalCluster, tmp_path: Path
) -> None:
    """The requests are those of a proxy. One reaches the decode engine first; the prefill engine dies in the end."""
    early, orphan = (
        [*PROMPT[:shared], *(at * step % 250 + 2 for at in range(400))] for shared, step in ((500, 11), (300, 13))
    )
    with engine(tiny_model) as alone:
        (expected, _), (of_early, _), (of_orphan, _) = alone.batch([PROMPT, early, orphan])
    gateway = engine_cluster.gateway_address
    with (
        _server(tiny_model, gateway, tmp_path / "prefill", role="kv_producer") as prefill,
        _server(tiny_model, gateway, tmp_path / "decode", role="kv_consumer", handover_s=8.0) as decode,
        concurrent.futures.ThreadPoolExecutor(1) as threads,
    ):
        parameters = prefill.prefill(PROMPT)
        assert parameters["quire_tokens"] == len(PROMPT) // BLOCK * BLOCK
        assert decode.tokens(PROMPT, parameters)[0] == expected
        blocks = WHOLE // BLOCK
        until(lambda: decode.figure("loaded_blocks") == blocks, "all whole blocks were loaded")

        both_at_once = threads.submit(decode.tokens, early, {"do_remote_prefill": True})
        time.sleep(0.5)
        assert not both_at_once.done(), "it waits for the engine that computes the prompt"
        prefill.prefill(early)
        assert both_at_once.result(60)[0] == of_early
        blocks += (len(early) - 1) // BLOCK - 500 // BLOCK  # it has the others in its own cache
        until(lambda: decode.figure("loaded_blocks") == blocks, "here too")

        prefill.kill()
        assert decode.tokens(orphan, {"do_remote_prefill": True, "quire_tokens": len(orphan)})[0] == of_orphan
        until(lambda: decode.figure("short_handovers") == 1, "it was computed here")
        assert decode.figure("handovers") == 3 and decode.figure("stored_blocks") == 0
