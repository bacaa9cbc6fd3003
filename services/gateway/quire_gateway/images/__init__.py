"""Images: rendering by the decoders, latent records, and the cache of what was just served."""
