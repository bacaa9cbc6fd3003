"""Kinds of VAEs by diffusers' configuration: the latents that they take, and the cost of decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_VIDEO: Final = ("AutoencoderKLQwenImage", "AutoencoderKLWan")
CLASSES: Final = ("AutoencoderKL", "AutoencoderKLFlux2", "AutoencoderTiny", "AutoencoderDC", *_VIDEO)
_WORKING_VALUES: Final = 8 / 3
"""Values that live at full resolution for each channel of the two last stages: measured on AutoencoderKL and
AutoencoderDC (2.0 to 2.7), less for AutoencoderTiny.
"""


@dataclass(frozen=True, slots=True)
class VaeKind:
    """`channels` of a latent; `scale`: pixels for each of its values, along each side; `frames`: it takes videos.

    `pixel_values`: about how many values decoding holds for each pixel; `force_upcast`: float16 overflows in it.
    """

    class_name: str
    channels: int
    scale: int
    frames: bool
    pixel_values: float
    scaling_factor: float
    shift_factor: float
    force_upcast: bool
    latents_mean: tuple[float, ...] = ()
    latents_std: tuple[float, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> VaeKind:
        """Read a configuration.

        Raises `ValueError` for a class that is not decoded here, and for an incomplete configuration.
        """
        name = config.get("_class_name", "")
        if name not in CLASSES:
            raise ValueError(f"it is a {name or 'model without a class'}; there are {', '.join(CLASSES)}")
        try:
            if name in _VIDEO:
                base = config.get("decoder_base_dim") or config["base_dim"]
                widths = [base * factor for factor in config["dim_mult"]]
                channels = config["z_dim"]
            else:
                widths = config.get("decoder_block_out_channels") or config["block_out_channels"]
                channels = config["latent_channels"]
            halvings = len(config.get("temperal_downsample") or widths[1:])  # diffusers spells it so
            scaling, shift = config.get("scaling_factor"), config.get("shift_factor")
            mean, std = (tuple(map(float, config.get(f"latents_{name}") or ())) for name in ("mean", "std"))
            if {len(mean), len(std)} not in ({0}, {int(channels)}):
                raise ValueError(f"{len(mean)} latents_mean and {len(std)} latents_std for {channels} channels")
            return cls(
                class_name=name,
                channels=int(channels),
                scale=2**halvings * (int(config.get("patch_size") or 1) if name in _VIDEO else 1),
                frames=name in _VIDEO,
                pixel_values=_WORKING_VALUES * sum(widths[:2]),
                scaling_factor=1.0 if scaling is None else float(scaling),
                shift_factor=0.0 if shift is None else float(shift),
                force_upcast=bool(config.get("force_upcast")),
                latents_mean=mean,
                latents_std=std,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"its configuration lacks a field of {name}: {error!r}") from None
