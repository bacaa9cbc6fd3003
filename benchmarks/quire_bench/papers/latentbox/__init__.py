"""LatentBox's cache as it was published, which the decoder's is compared with."""
