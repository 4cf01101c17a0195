"""Process scaffolding shared by all services: configuration, plugins, serving, telemetry."""
