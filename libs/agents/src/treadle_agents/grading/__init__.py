"""Graders that need more than a comparison: a library, a sandbox, or another model."""
