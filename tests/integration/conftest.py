"""A container engine for the tests of this folder: the machine's own, else one that they end."""

import container_engine
import container_images
import pytest
from containers import revision


@pytest.fixture(scope="session")
def engine():
    """A Docker client; the environment leads other clients to the same engine."""
    try:
        with container_engine.running() as client:
            yield client
    except container_engine.NoEngineError as error:
        pytest.skip(f"NOTHING RUNS IN CONTAINERS HERE: {error}")


@pytest.fixture(scope="session")
def images(engine):
    """Has the public images there."""
    container_images.provide(engine, "python:3.11-slim", "redis:7", "nats:2")
    return engine


@pytest.fixture(scope="session")
def our_images(images):
    """Has those of the working tree there too."""
    container_images.build(images, *container_images.OURS, revision=revision())
    return images
