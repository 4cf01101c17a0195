"""Servers that a run starts for itself, where its recipe names none: Redis, NATS and Ray.

`treadle train` supervises them beside the services. Each keeps its data in `RUN/servers/NAME`, is
reached on this host only, and is found by what lies there in `server.json`.
"""
