"""What a GPU is asked to do: prefixes delivered into its memory, latents decoded on it."""
