"""A Stable Diffusion pipeline whose images are kept as latents, and come back as PNG.

python examples/diffusers_latents.py --write FOLDER             a tiny pipeline of random weights, if you have none
quire up --models FOLDER                                        a decoder that knows its VAE
python examples/diffusers_latents.py 127.0.0.1:7410 FOLDER
"""

import asyncio
import sys
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

from quire.client import AsyncClient, ImageClient
from quire.integrations.diffusers import LatentKeeper

WITHOUT_TEXT = dict.fromkeys(("text_encoder", "tokenizer", "safety_checker", "feature_extractor", "image_encoder"))


def write_tiny_pipeline(folder: Path) -> None:
    """Of random weights: noise comes out, by way of everything that Stable Diffusion does."""
    torch.manual_seed(1)
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        norm_num_groups=4,
        latent_channels=4,
        scaling_factor=0.18215,
    )
    pipeline = StableDiffusionPipeline(
        vae=vae, unet=unet, scheduler=DDIMScheduler(), requires_safety_checker=False, **WITHOUT_TEXT
    )
    pipeline.save_pretrained(folder)


async def main(gateway: str, folder: Path) -> None:
    without = {} if (folder / "text_encoder").exists() else WITHOUT_TEXT
    pipeline = StableDiffusionPipeline.from_pretrained(folder, local_files_only=True, **without)
    pipeline.set_progress_bar_config(disable=True)
    if pipeline.text_encoder is None:
        said = {"prompt_embeds": torch.randn(1, 4, 16), "negative_prompt_embeds": torch.randn(1, 4, 16)}
    else:
        said = {"prompt": "a lighthouse in fog"}
    async with AsyncClient(gateway) as client:
        images = ImageClient(client)
        keeper = LatentKeeper(pipeline, images)
        pipeline(
            **said,
            height=64,
            width=64,
            num_inference_steps=4,
            output_type="latent",
            callback_on_step_end=keeper,
            callback_on_step_end_tensor_inputs=["latents"],
        )
        (entry,) = await keeper.store("lighthouse")
        picture = await images.get("lighthouse")
        out = folder / "lighthouse.png"
        out.write_bytes(picture.data)
        print(f"kept as {entry.record_bytes} bytes of latents, back as {len(picture.data)} bytes of PNG: {out}")


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        write_tiny_pipeline(Path(sys.argv[2]))
    else:
        asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
