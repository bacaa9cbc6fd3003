"""What Quire's images are compared with: a store of PNGs."""
