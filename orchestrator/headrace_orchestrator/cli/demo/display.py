"""Display of the demo: a live line while it runs, a table and a plot at the end."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from headrace_orchestrator.cli.demo.scores import binary_search_guesses, uniform_guesses
from headrace_orchestrator.cli.demo.trainer import Progress, TrainingResult
from headrace_orchestrator.cli.output import number

BARS = "▁▂▃▄▅▆▇█"

COLUMNS = ("player", "solved", "mean guesses")


def sparkline(values: Sequence[float], *, low: float, high: float) -> str:
    """Draw one bar for each value, on the scale from low to high."""
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((min(max(value, low), high) - low) * scale)] for value in values)


def sentence(progress: Progress) -> str:
    """Describe the progress in one sentence."""
    parts = [f"{progress.run}: {progress.phase}"]
    if progress.steps:
        last = progress.steps[-1]
        parts.append(f"version {last.version}")
        parts.append(f"reward {number(last.mean_reward, 2)}")
        parts.append(f"{number(last.mean_guesses, 2)} guesses")
    if progress.episodes_per_s:
        parts.append(f"{progress.episodes_per_s:.0f} episodes/s")
    if progress.waits_on:
        parts.append(f"the learner waits on {progress.waits_on}")
    return ", ".join(parts)


def live(progress: Progress) -> Text:
    """Render the line and the curve so far, on a scale from binary search to uniform guessing."""
    guesses = [step.mean_guesses for step in progress.steps]
    bars = sparkline(guesses, low=binary_search_guesses(), high=uniform_guesses())
    return Text(f"{sentence(progress)}\n{bars}")


def rows(training: TrainingResult, control: TrainingResult) -> list[list[str]]:
    """The rows of the final table."""
    scores = {
        "version 0, greedy": training.first,
        "trained, greedy": training.trained,
        "control (zero advantages), greedy": control.trained,
    }
    baselines = {"uniform guessing": uniform_guesses(), "binary search": binary_search_guesses()}
    return [
        *([name, f"{score.solved}/{score.targets}", f"{score.mean_guesses:.2f}"] for name, score in scores.items()),
        *([name, "computed", f"{mean:.2f}"] for name, mean in baselines.items()),
    ]


def curves(*trainings: TrainingResult) -> list[str]:
    """Draw the mean guesses of each trained batch: one line of bars for each training, all on one scale."""
    guesses = [[step.mean_guesses for step in training.steps] for training in trainings]
    low, high = min(map(min, guesses)), max(map(max, guesses))
    width = max(len(training.run) for training in trainings)
    return [
        f"{training.run:<{width}}  {shown[0]:.2f} {sparkline(shown, low=low, high=high)} {shown[-1]:.2f}"
        for training, shown in zip(trainings, guesses, strict=True)
    ]
