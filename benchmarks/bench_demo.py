"""The demo: what it learns and how long it takes.

python -m benchmarks.bench_demo
"""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.table import Row, report

SECONDS, GUESSES = 90.0, 5.1
"""What the project promises of the demo."""


def main() -> None:
    command = [sys.executable, "-m", "headrace_orchestrator.cli", "demo", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    mean = found["mean_guesses"]
    report(
        "demo",
        [
            Row("targets solved, greedily", found["solved"], "targets", "all", found["targets"], 1.0, "higher"),
            Row("mean guesses after training", mean, "guesses", "the promise", GUESSES, 1.0, "lower"),
            Row("mean guesses after training", mean, "guesses", "uniform", found["uniform_guesses"], 1.0, "lower"),
            Row(
                "mean guesses after training", mean, "guesses", "binary", found["binary_search_guesses"], 1.05, "lower"
            ),
            Row("the whole demo", found["seconds"], "s", "the promise", SECONDS, 1.0, "lower"),
        ],
    )


if __name__ == "__main__":
    main()
