"""The lens: latents to pixels. In this version it joins the cluster, reports health, and declines to decode."""
