"""Episode payloads: the codec, the store port and its content-addressed files."""
