"""vLLM engines on the CPU as processes of their own, which take prompts over a pipe: several at the same time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from quire.model.errors import InternalError
from quire_tools.engines.vllm import BLOCK, prepare, vllm_engine

_WARM_UP: Final = list(range(2, 2 + 2 * BLOCK))


@dataclass(frozen=True, slots=True)
class Answer:
    """`cached`: tokens of the prompt. `took_s`: seconds in the engine. `parameters`: for the engine that decodes."""

    tokens: list[int]
    cached: int
    took_s: float
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A process of vLLM."""

    name: str
    process: subprocess.Popen[str]

    def ready(self) -> None:
        """Wait until it takes prompts. Raises `InternalError` if it has ended."""
        self._hear()

    def ask(
        self,
        prompt: Sequence[int],
        count: int = 1,
        *,
        fresh: bool = False,
        parameters: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Generate greedily.

        Args:
            prompt: Tokens.
            count: Tokens to generate.
            fresh: Forget vLLM's own prefix cache before.
            parameters: `kv_transfer_params` of the request.

        Raises:
            InternalError: The process has ended.
        """
        assert self.process.stdin is not None, "it was opened with one"
        request = {"prompt": list(prompt), "count": count, "fresh": fresh, "parameters": parameters}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Answer(**self._hear())

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None, "it was opened with one"
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise InternalError(f"{self.name} has ended with {self.process.wait()}")


@contextmanager
def engine_process(
    name: str,
    model: Path,
    log: Path,
    *,
    gateway: str = "",
    extra: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Iterator[EngineProcess]:
    """Start vLLM with Quire, or alone without a gateway, for the time of the context.

    Args:
        name: For messages.
        model: Folder of the model.
        log: File for its standard error.
        gateway: Address of Quire's gateway.
        extra: The connector's settings.
        settings: Of `vllm.LLM`, and the connector's `kv_role`.
    """
    start = json.dumps({"model": str(model), "gateway": gateway, "extra": extra, "settings": settings})
    command = [sys.executable, "-m", __name__, start]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(os.environ)
        )
        try:
            yield EngineProcess(name, process)
        finally:
            process.kill()
            process.wait()


def serve(start: Mapping[str, Any]) -> None:
    """Take a line of JSON for each prompt, and print one for its answer."""
    prepare()
    from vllm import SamplingParams

    with vllm_engine(Path(start["model"]), start["gateway"], start["extra"], **start["settings"]) as engine:
        engine.tokens(_WARM_UP, 1)  # what an engine does once
        print("{}", flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            if request["fresh"]:
                engine.forget()
            hint = {"kv_transfer_params": request["parameters"]} if request["parameters"] else None
            greedy = SamplingParams(temperature=0, max_tokens=request["count"], ignore_eos=True, extra_args=hint)
            began_s = time.perf_counter()
            (answer,) = engine.llm.generate([{"prompt_token_ids": request["prompt"]}], greedy, use_tqdm=False)
            record = {
                "tokens": list(answer.outputs[0].token_ids),
                "cached": answer.num_cached_tokens,
                "took_s": time.perf_counter() - began_s,
                "parameters": answer.kv_transfer_params or {},
            }
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
