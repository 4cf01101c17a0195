"""The gateway: agents speak to a policy over the wires they know, and every token is recorded."""
