"""Doorbells: `poll`, `nats`, and one for a single process."""
