"""Models that drive the experience service and the checkpoint store, and say what must hold."""
