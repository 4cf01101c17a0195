"""The treadle command: composes services, never computes."""
