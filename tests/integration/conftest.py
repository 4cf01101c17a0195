"""A container engine for the tests of this folder: the machine's own, else one that they end."""

import os

import container_engine
import container_images
import pytest


@pytest.fixture(scope="session")
def engine():
    """A Docker client; the environment leads other clients to the same engine."""
    try:
        found = container_engine.find()
        environment = container_engine.start() if found is None else found
    except container_engine.NoEngineError as error:
        pytest.skip(f"NOTHING RUNS IN CONTAINERS HERE: {error}")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**container_engine.TESTCONTAINERS, **environment}.items():
            patch.setenv(name, os.environ.get(name, value))
        client = container_engine.client(environment)
        yield client
        client.close()
    if found is None:
        container_engine.stop()


@pytest.fixture(scope="session")
def images(engine):
    """Has the public images there."""
    container_images.provide(engine, "redis:7", "nats:2")
    return engine
