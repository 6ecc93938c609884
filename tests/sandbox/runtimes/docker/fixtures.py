"""One Docker daemon with three images for all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.sandbox.runtimes.docker import images
from tests.sandbox.runtimes.docker.docker_daemon import DockerDaemon


class DockerSetup(NamedTuple):
    """A daemon and its images: with Python, with a shell but no Python, with neither."""

    daemon: DockerDaemon
    python: str
    shell: str
    bare: str


@pytest.fixture(scope="session")
def docker() -> Iterator[DockerSetup]:
    daemon = DockerDaemon()
    try:
        daemon.start()
        yield DockerSetup(
            daemon,
            daemon.load("python", images.PYTHON),
            daemon.load("shell", images.SHELL),
            daemon.load("bare", images.BARE),
        )
    finally:
        daemon.stop()
