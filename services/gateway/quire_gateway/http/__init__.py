"""Images over HTTP, for browsers, CDNs and scripts."""
