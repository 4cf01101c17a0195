"""The trainer service: parameters and optimiser."""
