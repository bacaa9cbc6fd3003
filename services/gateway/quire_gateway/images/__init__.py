"""Images: rendering by the decoders, latent records, and the cache of served images."""
