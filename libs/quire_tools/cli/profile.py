"""`quire profile`: the compute profile of a model at hand."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from quire.integrations.profiling import measure_profile
from quire.model.errors import InvalidRequest

console = Console(highlight=False)


def measure(out: Path, model: str, name: str, device: str, inputs: list[int], prefixes: list[int], rounds: int) -> None:
    """Measure, print, write. Raises `InvalidRequest` for a model that does not load."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"{out.parent}: {error.strerror}", field="out") from None
    on = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = _load(model).to(on)
    machine = torch.cuda.get_device_name() if on == "cuda" else platform.processor() or platform.machine()
    with Progress(transient=True) as progress:
        task = progress.add_task("prefills", total=len(inputs) * len(prefixes))
        profile = measure_profile(
            loaded,
            name or model or "quire-demo-llama",
            device or machine.lower().replace(" ", "-"),
            inputs,
            prefixes,
            rounds=rounds,
            progress=lambda: progress.advance(task),
        )
    profile.save(out)
    table = Table("input tokens", *(f"behind {prefix}, ms" for prefix in prefixes))
    times = {(sample.input_tokens, sample.prefix_tokens): sample.seconds * 1e3 for sample in profile.samples}
    for length in inputs:
        table.add_row(str(length), *(f"{times[length, prefix]:.1f}" for prefix in prefixes))
    console.print(table)
    console.print(f"{profile.model} on {profile.device}, {profile.num_layers} layers: [bold]{out}[/]")


def _load(model: str) -> Any:
    if not model:
        from quire_tools.cli.demos.kv import demo_model

        return demo_model()
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(model).eval()
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{model!r} does not load: {error}", field="model") from None
