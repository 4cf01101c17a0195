"""Environments of other libraries as agents, unmodified; each needs the extra of its name."""
