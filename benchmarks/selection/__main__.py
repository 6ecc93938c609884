"""The trade of selection: how often slow tasks are trained on, and what the wait for them costs.

    python -m benchmarks.selection

The real scheduler runs on a virtual clock: every fourth task takes 0 to 3 seconds, the others 0.02 s, a step of the
learner 0.1 s; groups of 2, batches of 16 episodes, 64 slots. Each order runs until 100 versions are made. The plot goes
to ``docs/selection-trade.svg``, the figures to standard output. The result is the same on every machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.selection.line_chart import Line, Panel, line_charts
from benchmarks.selection.simulation import Simulation
from headrace.wire import messages

VERSIONS = 100
STEP_S = 0.1
FAST_S = 0.02
SLOW_S = (0.02, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0)
STALENESS = (0, 1, 3)
ORDERS = ("fifo", "ready")
MIXTURE = [{"id": "e:fast", "weight": 3.0}, {"id": "e:slow", "weight": 1.0}]
PLOT = Path(__file__).resolve().parents[2] / "docs" / "selection-trade.svg"


class Point(NamedTuple):
    """A simulated run: share of the slow tasks in percent, versions a second, and groups that went stale."""

    order: str
    max_staleness: int
    slow_s: float
    drawn: float
    trained: float
    rate: float
    bound: float
    stale: int


def takes(slow_s: float) -> Callable[[messages.Assignment], float]:
    """Durations of attempts where a slow task takes ``slow_s``."""
    return lambda attempt: slow_s if attempt.task.environment == "e:slow" else FAST_S


def simulate(order: str, max_staleness: int, slow_s: float) -> Point:
    """Simulate one run."""
    spec = {
        "environments": MIXTURE,
        "group_size": 2,
        "batch_size": 16,
        "max_staleness": max_staleness,
        "selection": {"order": order},
    }
    run = Simulation(spec, takes(slow_s), step_s=STEP_S).run(VERSIONS)
    drawn, trained = (100 * run.share("e:slow", counts) for counts in (run.drawn, run.trained))
    bound = min(1 / STEP_S, (max_staleness + 1) / (slow_s + STEP_S))
    return Point(
        order, max_staleness, slow_s, drawn, trained, len(run.versions) / run.seconds, bound, run.retired["stale"]
    )


def plot(points: Sequence[Point], file: Path) -> None:
    """Draw the share and the rate over the time of a slow task."""

    def lines(value: Callable[[Point], float]) -> list[Line]:
        return [
            Line(
                f"{order}, max_staleness {staleness}",
                [(p.slow_s, value(p)) for p in points if (p.order, p.max_staleness) == (order, staleness)],
                colour=number,
                dashed=order != "fifo",
            )
            for order in ORDERS
            for number, staleness in enumerate(STALENESS)
        ]

    x = "seconds that a slow task takes"
    panels = [
        Panel("Slow tasks in what is trained on, % (25 % are drawn)", x, lines(lambda point: point.trained)),
        Panel("Versions a second", x, lines(lambda point: point.rate)),
    ]
    file.write_text(line_charts(panels), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate the trade of selection, and draw it.")
    parser.add_argument("--plot", type=Path, default=PLOT, help="file for the plot")
    options = parser.parse_args()
    points = [simulate(*key) for key in ((o, m, s) for o in ORDERS for m in STALENESS for s in SLOW_S)]
    print("order  max_staleness  slow_s  drawn  trained  versions/s  bound  stale")
    for p in points:
        print(
            f"{p.order:<6} {p.max_staleness:>13}  {p.slow_s:>6.2f}  {p.drawn:>4.1f}%  {p.trained:>6.1f}%  "
            f"{p.rate:>10.2f}  {p.bound:>5.2f}  {p.stale:>5}"
        )
    plot(points, options.plot)
    print(f"Plot: {options.plot}")


if __name__ == "__main__":
    main()
