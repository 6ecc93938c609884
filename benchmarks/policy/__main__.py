"""The policy plane, measured on a real vLLM and on the double.

make bench-policy                 # needs `make parts`; some ten minutes
make bench-policy ARGS=cost       # one part: cost, throughput, updates
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.policy import cost, throughput, updates
from benchmarks.policy.vllm import AT_ONCE, Vllm
from benchmarks.service import service
from benchmarks.table import RESULTS, Row, report
from examples.tiny_model import write_model
from examples.vllm_server import PYTHON, start_vllm
from headrace import Client
from tests.vllm.server import TorchLogprobs

PARTS = ("cost", "throughput", "updates")
REAL = {"throughput", "updates"}


def main() -> None:
    wanted = sys.argv[1:] or list(PARTS)
    if unknown := set(wanted) - set(PARTS):
        raise SystemExit(f"No part {', '.join(unknown)}. There are: {', '.join(PARTS)}.")
    if REAL & set(wanted) and not PYTHON.exists():
        raise SystemExit("There is no vLLM here: install it with make parts, or measure without: ARGS=cost.")
    rows = cost.rows() if "cost" in wanted else []
    if REAL & set(wanted):
        rows += _real(wanted)
    report("policy", rows)


def _real(wanted: list[str]) -> list[Row]:
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
                if "throughput" in wanted:
                    rows += throughput.rows(running, client, server)
                if "updates" in wanted:
                    rows += updates.rows(client, server, forward, folder / "weights")
    forward.end()
    return rows


if __name__ == "__main__":
    main()
