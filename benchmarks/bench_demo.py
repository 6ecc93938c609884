"""Results and duration of the demo.

python -m benchmarks.bench_demo
"""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.table import Row, report

SECONDS, GUESSES = 90.0, 5.1
"""The duration and the mean guesses that the project promises for the demo."""


def main() -> None:
    command = [sys.executable, "-m", "headrace_orchestrator.cli", "demo", "--json"]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    summary = json.loads(process.stdout.splitlines()[-1])
    mean = summary["mean_guesses"]
    report(
        "demo",
        [
            Row("targets solved, greedily", summary["solved"], "targets", "all", summary["targets"], 1.0, "higher"),
            Row("mean guesses after training", mean, "guesses", "the promise", GUESSES, 1.0, "lower"),
            Row("mean guesses after training", mean, "guesses", "uniform", summary["uniform_guesses"], 1.0, "lower"),
            Row(
                *("mean guesses after training", mean, "guesses", "binary search"),
                *(summary["binary_search_guesses"], 1.05, "lower"),
            ),
            Row("the whole demo", summary["seconds"], "s", "the promise", SECONDS, 1.0, "lower"),
        ],
    )


if __name__ == "__main__":
    main()
