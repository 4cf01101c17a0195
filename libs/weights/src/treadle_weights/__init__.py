"""Weights in motion: layouts, plans, digests and the transports that carry them."""
