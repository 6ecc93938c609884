"""Estimators on 1,024 trajectories of 8 turns, against a budget of 20 ms each.

python -m benchmarks.bench_estimators
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from benchmarks.table import Row, report
from headrace import estimators

TRAJECTORIES, TURNS, GROUP, ROUNDS = 1_024, 8, 8, 21
BUDGET_MS = 20.0


def main() -> None:
    generator = np.random.default_rng(0)
    experience = estimators.Experience(
        rewards=generator.normal(size=TRAJECTORIES * TURNS),
        tokens=generator.integers(1, 500, TRAJECTORIES * TURNS),
        offsets=np.arange(0, TRAJECTORIES * TURNS + 1, TURNS),
        groups=np.repeat(np.arange(TRAJECTORIES // GROUP), GROUP),
    )
    rows = []
    for name in estimators.ESTIMATORS:
        times = []
        for _ in range(ROUNDS):
            started_at = time.perf_counter()
            estimators.advantages(name, experience, gamma=0.99, ddof=0, eps=1e-9, weighting="turn")
            times.append(1e3 * (time.perf_counter() - started_at))
        rows.append(Row(f"{name} on 1,024 × 8", statistics.median(times), "ms", "budget", BUDGET_MS, 1.0, "lower"))
    report("estimators", rows)


if __name__ == "__main__":
    main()
