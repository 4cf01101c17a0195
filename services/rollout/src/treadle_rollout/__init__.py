"""The rollout service: one engine and the agents that use it."""
