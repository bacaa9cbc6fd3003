"""Build of an engine for a VAE and a shape: the VAE is exported, compiled ahead of time and written into a file.

python -m quire_decoder.adapters.engine_build ARGUMENTS FILE
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_NICENESS: Final = 10


def build_engine(vae: Any, latents: Any, compiler: str, path: Path) -> None:
    """Export a VAE's decode and compile it.

    Args:
        vae: Of diffusers, on its device.
        latents: A batch as it will be decoded, (N, C, h, w) or (N, C, 1, h, w).
        compiler: "compile" (inductor) or "tensorrt".
        path: The file.
    """
    import torch

    class Decoding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vae = vae

        def forward(self, batch: Any) -> Any:
            return self.vae.decode(batch, return_dict=False)[0]

    with torch.no_grad():
        exported = torch.export.export(Decoding(), (latents,))
        if compiler == "tensorrt":
            tensorrt: Any = importlib.import_module("torch_tensorrt")
            compiled = tensorrt.dynamo.compile(exported, inputs=[latents], enabled_precisions={latents.dtype})
            tensorrt.save(compiled, str(path), inputs=[latents])
        else:
            inductor: Any = importlib.import_module("torch._inductor")
            inductor.aoti_compile_and_package(exported, package_path=str(path))


def load_engine(path: Path, compiler: str, device: str) -> Callable[[Any], Any]:
    """Load an engine. Raises what torch raises for a file that does not fit.

    Args:
        path: The file.
        compiler: That built it.
        device: As torch names it.
    """
    import torch

    if compiler == "tensorrt":
        tensorrt: Any = importlib.import_module("torch_tensorrt")
        with torch.cuda.device(device):
            module: Callable[[Any], Any] = tensorrt.load(str(path)).module()
        return module
    inductor: Any = importlib.import_module("torch._inductor")
    index = torch.device(device).index
    package: Callable[[Any], Any] = inductor.aoti_load_package(str(path), device_index=-1 if index is None else index)
    return package


def main(arguments: dict[str, Any], path: Path) -> None:
    """Build, with random latents."""
    os.nice(_NICENESS)
    import torch

    from quire_decoder.adapters.loading import read_vae
    from quire_decoder.adapters.weights import in_folder

    variants = {weights.variant: weights for weights in in_folder(Path(arguments["folder"]))}
    weights = variants[arguments["variant"]]
    if weights.sha256 != arguments["sha256"]:
        sys.exit(f"{weights.folder} has other weights than those that the decoder loaded")
    vae = read_vae(weights, arguments["dtype"]).to(arguments["device"])
    latents = torch.randn(arguments["shape"]).to(arguments["device"]).to(vae.dtype)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
        part = Path(folder) / path.name
        build_engine(vae, latents, arguments["compiler"], part)
        part.rename(path)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
