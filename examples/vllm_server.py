"""A real vLLM server for a model folder, started as Headrace wants it. For examples, tests and benchmarks on CPUs.

    python examples/tiny_model.py build/tiny
    python examples/vllm_server.py build/tiny --port 8000          # Ctrl-C ends it; further arguments go to vLLM
    headrace up --policy-endpoint http://127.0.0.1:8000

* It takes new weights from a folder (headrace.integrations.vllm) and says which weights sampled which tokens.
* It runs in the environment that `make parts` made, and is ready after half a minute to three minutes.
* It ends with the process that started it, however that dies.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PLACE = Path(__file__).resolve().parent.parent / "build" / "parts" / "vllm"
PYTHON = PLACE / "bin" / "python"

NAME = "policy"
"""What the model is called in requests."""

START_S, END_S = 600.0, 30.0
"""A start on a busy machine takes minutes; an end does not."""

GROUP_END_S = 5.0
"""What the server has started dies of its own a moment later, a busy machine permitting."""

# Started with -c and not with -m, because the processes that it spawns would import the whole API server again.
# PR_SET_PDEATHSIG (1): a SIGTERM when the process that started this one dies.
PROGRAM = """\
import ctypes, runpy, signal
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
"""

ARGUMENTS = [
    *("--host", "127.0.0.1", "--served-model-name", NAME),
    # Without, a float32 model is served in bfloat16, and its logprobs are not the learner's.
    *("--dtype", "float32"),
    *("--worker-extension-cls", "headrace.integrations.vllm.WorkerExtension", "--enable-scale-out"),
    # No compilation, and engine and worker in one process: that is most of the time that a start takes.
    *("--enforce-eager", "--distributed-executor-backend", "uni"),
    *("--max-num-seqs", "64", "--uvicorn-log-level", "warning"),
    # A request with a seed whose prompt is computed in parts kills this vLLM on CPUs ("CPU Generator does not use
    # offset"). That happens whenever many requests come, or go on after a pause, together.
    "--no-enable-chunked-prefill",
]

SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause, load and name weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",  # with --enable-lora: adapters come and go while it runs
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the executor above is refused
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else the first request for logprobs compiles a function: half a minute, and needs g++
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "XDG_CACHE_HOME": str(PLACE / "cache"),
    "XDG_CONFIG_HOME": str(PLACE / "cache"),
}

LATE_S = 30.0
"""To answer, for a server that was started long before anybody waits for it."""


class StartFailed(RuntimeError):
    """The server ended, or was not ready in time; the message has the end of its log."""


@contextmanager
def start_vllm(
    model: Path,
    *arguments: str,
    log: Path | None = None,
    port: int = 0,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> Iterator[str]:
    """A server of the model in a folder, with further ``arguments`` for vLLM, until the block ends.

    Gives its address once it is ready. ``log``: where it writes; ``say`` is told every ten seconds that it still
    starts. Raises StartFailed, FileNotFoundError without ``make parts``.
    """
    server = Server(model, *arguments, log=log, port=port)
    try:
        server.wait_until_ready(say)
        yield server.address
    finally:
        server.end()


class Server:
    """The process of a server, which starts; it is ready once ``wait_until_ready`` returns. Arguments as above."""

    def __init__(self, model: Path, *arguments: str, log: Path | None = None, port: int = 0) -> None:
        if not PYTHON.exists():
            raise FileNotFoundError(f"There is no vLLM at {PYTHON}. Install it with: make parts")
        port = port or _free_port()
        self.address = f"http://127.0.0.1:{port}"
        self._log = log or Path(tempfile.gettempdir()) / f"vllm-{port}.log"
        self._begun = time.monotonic()
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(
                [str(PYTHON), "-c", PROGRAM, "--model", str(model), "--port", str(port), *ARGUMENTS, *arguments],
                env={**os.environ, **SETTINGS},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the process, which leads a group of its own."""
        return self._process.pid

    def wait_until_ready(self, say: Callable[[str], None]) -> None:
        """Raises StartFailed."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        said = time.monotonic()
        until = max(self._begun + START_S, said + LATE_S)
        while self._process.poll() is None and time.monotonic() < until:
            with suppress(OSError), opener.open(f"{self.address}/health", timeout=5):
                return
            if time.monotonic() - said >= 10:
                said = time.monotonic()
                say(f"vLLM is starting, {said - self._begun:.0f} s (log: {self._log})")
            time.sleep(0.2)
        end = self._log.read_text(errors="replace").splitlines()[-15:]
        status = self._process.poll()
        what = "was not ready in time" if status is None else f"ended with status {status}"
        raise StartFailed("\n".join([f"vLLM {what}. The end of {self._log}:", *end]))

    def end(self) -> None:
        """Ends the server and what it started: a process group of its own."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, sign)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        give_up_at = time.monotonic() + GROUP_END_S
        with suppress(ProcessLookupError):  # raised once the last of the group is gone
            while time.monotonic() < give_up_at:
                os.killpg(self._process.pid, 0)
                time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves a model folder with vLLM; further arguments go to vLLM.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    asked, further = parser.parse_known_args()
    with suppress(KeyboardInterrupt), start_vllm(asked.model, *further, port=asked.port) as address:
        print(f"serving {asked.model} as {NAME!r} at {address}", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
