"""``docker exec`` in a container of a daemon that the benchmark starts and stops."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.sandbox.ways import Way


@contextmanager
def docker_exec() -> Iterator[tuple[Way | None, str]]:
    """A way to run ``print(1)``, with its name; or None, with the reason."""
    missing = [name for name in ("docker", "dockerd", "unshare") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        yield None, f"docker exec: it takes root and {', '.join(missing) or 'is not root here'}; make parts"
        return
    from tests.sandbox.runtimes.docker import images
    from tests.sandbox.runtimes.docker.docker_daemon import DockerDaemon

    daemon = DockerDaemon()
    try:
        daemon.start()
        image = daemon.load("bench", images.PYTHON)
        variables = {**os.environ, "DOCKER_HOST": daemon.host}

        def docker(*arguments: str) -> None:
            subprocess.run(["docker", *arguments], env=variables, check=True, capture_output=True)

        docker("run", "--detach", "--network", "none", "--name", "bench", image, "sleep", "3600")

        async def way() -> None:
            await asyncio.to_thread(docker, "exec", "bench", "python3", "-c", "print(1)")

        yield way, "docker exec"
        docker("kill", "bench")
    finally:
        daemon.stop()
