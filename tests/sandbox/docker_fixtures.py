"""One Docker daemon with three images for all tests of a session that want one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.sandbox import docker_image
from tests.sandbox.docker_daemon import DockerDaemon


class Served(NamedTuple):
    """A daemon, and its images: with Python, with a shell and no Python, with neither."""

    daemon: DockerDaemon
    python: str
    shell: str
    bare: str


@pytest.fixture(scope="session")
def docker() -> Iterator[Served]:
    daemon = DockerDaemon()
    try:
        daemon.start()
        yield Served(
            daemon,
            daemon.load("python", docker_image.PYTHON),
            daemon.load("shell", docker_image.SHELL),
            daemon.load("bare", docker_image.BARE),
        )
    finally:
        daemon.stop()
