"""The decoder: latents to pixels on a GPU or the CPU, behind a cache that keeps both forms."""
