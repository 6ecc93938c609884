"""A vLLM server for a model folder, with the options that Headrace needs. For examples, tests and benchmarks on CPUs.

    python examples/tiny_model.py build/tiny
    python examples/vllm_server.py build/tiny --port 8000          # Ctrl-C ends it; other arguments go to vLLM
    headrace up --policy-endpoint http://127.0.0.1:8000

* It loads new weights from a folder (headrace.integrations.vllm), and reports the weights that sampled each token.
* It runs in the environment made by `make parts`, and is ready after half a minute to three minutes.
* It ends with the process that started it, even if that is killed.
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
"""Name of the model in requests."""

START_S, END_S = 600.0, 30.0
"""Longest waits for the start, which takes minutes on a busy machine, and for the end."""

GROUP_END_S = 5.0
"""Longest wait for the end of the server's own child processes."""

# Started with -c: with -m, the processes that it spawns would import the whole API server again.
# PR_SET_PDEATHSIG (1): the kernel sends SIGTERM when the parent process dies.
PROGRAM = """\
import ctypes, runpy, signal
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
"""

ARGUMENTS = [
    *("--host", "127.0.0.1", "--served-model-name", NAME),
    # Otherwise a float32 model is served in bfloat16, and its logprobs differ from the learner's.
    *("--dtype", "float32"),
    *("--worker-extension-cls", "headrace.integrations.vllm.WorkerExtension", "--enable-scale-out"),
    # No compilation, and engine and worker in one process: both would take most of the start's time.
    *("--enforce-eager", "--distributed-executor-backend", "uni"),
    *("--max-num-seqs", "64", "--uvicorn-log-level", "warning"),
    # This vLLM on CPUs crashes on a request with a seed whose prompt is computed in parts ("CPU Generator does not use
    # offset"), which happens when many requests arrive, or continue after a pause, at the same time.
    "--no-enable-chunked-prefill",
]

SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause, load weights and report their version
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",  # with --enable-lora: loads and unloads adapters while it runs
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # required by the executor above
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request for logprobs compiles for half a minute and needs g++
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "XDG_CACHE_HOME": str(PLACE / "cache"),
    "XDG_CONFIG_HOME": str(PLACE / "cache"),
}

MIN_WAIT_S = 30.0
"""Shortest wait in ``wait_until_ready``, even if the server was started long before."""


class StartFailed(RuntimeError):
    """The server ended or was not ready in time. The message includes the end of its log."""


@contextmanager
def start_vllm(
    model: Path,
    *arguments: str,
    log: Path | None = None,
    port: int = 0,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> Iterator[str]:
    """Serve the model in a folder until the block ends; yield the address once the server is ready.

    ``arguments`` go to vLLM; ``log``: the server's log file; ``say`` is called every ten seconds during the start.
    Raises StartFailed, and FileNotFoundError if vLLM is not installed.
    """
    server = Server(model, *arguments, log=log, port=port)
    try:
        server.wait_until_ready(say)
        yield server.address
    finally:
        server.end()


class Server:
    """A starting or running server. The arguments are those of ``start_vllm``."""

    def __init__(self, model: Path, *arguments: str, log: Path | None = None, port: int = 0) -> None:
        if not PYTHON.exists():
            raise FileNotFoundError(f"vLLM is not installed at {PYTHON}. Install it with: make parts")
        port = port or _free_port()
        self.address = f"http://127.0.0.1:{port}"
        self._log = log or Path(tempfile.gettempdir()) / f"vllm-{port}.log"
        self._started_at = time.monotonic()
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
        """Id of the process, and of its process group."""
        return self._process.pid

    def wait_until_ready(self, say: Callable[[str], None]) -> None:
        """Wait until the server is ready; call ``say`` every ten seconds. Raises StartFailed."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        said_at = time.monotonic()
        until = max(self._started_at + START_S, said_at + MIN_WAIT_S)
        while self._process.poll() is None and time.monotonic() < until:
            with suppress(OSError), opener.open(f"{self.address}/health", timeout=5):
                return
            if time.monotonic() - said_at >= 10:
                said_at = time.monotonic()
                say(f"vLLM is starting, {said_at - self._started_at:.0f} s (log: {self._log})")
            time.sleep(0.2)
        end = self._log.read_text(errors="replace").splitlines()[-15:]
        status = self._process.poll()
        what = "was not ready in time" if status is None else f"ended with status {status}"
        raise StartFailed("\n".join([f"vLLM {what}. The end of {self._log}:", *end]))

    def end(self) -> None:
        """End the server's process group."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, sign)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        give_up_at = time.monotonic() + GROUP_END_S
        with suppress(ProcessLookupError):  # raised once the group has no process any more
            while time.monotonic() < give_up_at:
                os.killpg(self._process.pid, 0)
                time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a model folder with vLLM; other arguments go to vLLM.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    options, vllm_arguments = parser.parse_known_args()
    with suppress(KeyboardInterrupt), start_vllm(options.model, *vllm_arguments, port=options.port) as address:
        print(f"serving {options.model} as {NAME!r} at {address}", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
