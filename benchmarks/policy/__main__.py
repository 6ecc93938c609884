"""Benchmarks of policy serving, with a real vLLM and with the tiny policy.

make bench-policy                 # needs `make parts`; takes about ten minutes
make bench-policy ARGS=cost       # one part: cost, digests, throughput or updates
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.policy import cost, digests, throughput, updates
from benchmarks.policy.vllm import AT_ONCE, Vllm
from benchmarks.service import service
from benchmarks.table import RESULTS, Row, report
from examples.tiny_model import write_model
from examples.vllm_server import PYTHON, start_vllm
from headrace import Client
from tests.vllm.server import TorchLogprobs

PARTS = ("cost", "digests", "throughput", "updates")
VLLM_PARTS = {"throughput", "updates"}


def main() -> None:
    parts = sys.argv[1:] or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"Unknown part: {', '.join(unknown)}. The parts are {', '.join(PARTS)}.")
    if VLLM_PARTS & set(parts) and not PYTHON.exists():
        raise SystemExit("vLLM is not installed. Run make parts, or measure without it: ARGS='cost digests'.")
    rows = cost.rows() if "cost" in parts else []
    rows += digests.rows() if "digests" in parts else []
    if VLLM_PARTS & set(parts):
        rows += _vllm_rows(parts)
    report("policy", rows)


def _vllm_rows(parts: list[str]) -> list[Row]:
    rows: list[Row] = []
    forward = TorchLogprobs()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name, service() as running:
        folder = Path(name)
        write_model(folder / "model", hidden=128)
        RESULTS.mkdir(parents=True, exist_ok=True)
        with start_vllm(folder / "model", log=RESULTS / "policy-vllm.log") as address:
            running.start_orchestrator()
            running.start_worker(slots=AT_ONCE)
            server = Vllm(address, folder / "model")
            with Client(running.url) as client:
                if "throughput" in parts:
                    rows += throughput.rows(running, client, server)
                if "updates" in parts:
                    rows += updates.rows(client, server, forward, folder / "weights")
    forward.end()
    return rows


if __name__ == "__main__":
    main()
