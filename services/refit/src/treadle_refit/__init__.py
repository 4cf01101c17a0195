"""The refit service: fleet membership and policy versions."""
