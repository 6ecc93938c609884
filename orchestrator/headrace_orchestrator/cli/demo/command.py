"""The command ``headrace demo``."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.live import Live

from headrace.errors import SetupError
from headrace_orchestrator.cli.demo import display
from headrace_orchestrator.cli.demo.processes import DemoStage, staged
from headrace_orchestrator.cli.demo.scores import TARGETS, binary_search_guesses, learned, uniform_guesses
from headrace_orchestrator.cli.demo.trainer import Progress, Trainer, TrainingResult
from headrace_orchestrator.cli.output import FAILED, emit_line, json_option, note, notes, shared, table
from headrace_orchestrator.cli.up import LOOK_S, pause, stop_signal

VERSIONS = 40
"""Steps of the learner: enough to play like a binary search."""

SECONDS = 90.0
"""Most seconds for the whole demo."""


@click.command(short_help="Train a tiny policy to guess a number, from nothing.")
@click.option("--versions", default=VERSIONS, show_default=True, type=click.IntRange(1), help="Steps of the learner.")
@click.option("--seconds", default=SECONDS, show_default=True, type=click.FloatRange(1), help="Most it may take.")
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="Keep the data here. Default: nowhere.")
@click.option("--keep", is_flag=True, help="Keep running afterwards, to look around, until Ctrl-C.")
@json_option
def demo(versions: int, seconds: float, data: Path | None, keep: bool) -> None:
    """Train a tiny policy to guess a number, from nothing, on this machine. Takes about a minute.

    Starts an orchestrator, two workers and a tiny policy as processes of their own, evaluates version 0 on every
    target, runs the learner of the examples, and evaluates again. Then the control: the same with all advantages
    zero, which must not improve. Ends with 1 if nothing was learned.

    \b
    Examples:
      headrace demo
      headrace demo --data demo-data --keep
    """
    started = time.monotonic()
    with stop_signal() as stop, _directory(data) as directory, staged(directory, pause(stop)) as stage:
        with _shown() as show_progress:
            teacher = Trainer(
                stage, versions=versions, deadline=started + seconds, show=show_progress, sleep=pause(stop)
            )
            taught = teacher.teach("guess", zero_advantages=False)
            control = teacher.teach("control", zero_advantages=True)
        success = learned(taught.first, taught.trained, control.trained)
        _conclude(taught, control, success, time.monotonic() - started)
        if keep:
            _look_around(stage)
            while not stop.wait(LOOK_S):
                stage.supervisor.poll()
    if not success:
        note("Nothing was learned: training should beat uniform guessing, and the control should not.")
        click.get_current_context().exit(FAILED)


@contextmanager
def _directory(data: Path | None) -> Iterator[Path]:
    if data is not None:
        if data.exists() and any(data.iterdir()):
            raise SetupError(f"{data} is not empty.", hint="The demo needs a new directory: choose another --data.")
        yield data
        return
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as name:
        yield Path(name)


@contextmanager
def _shown() -> Iterator[Callable[[Progress], None]]:
    """A live view on a terminal, a line per phase when piped, nothing with --json."""
    if shared().json:
        yield lambda progress: None
    elif notes().is_terminal:
        with Live(console=notes(), auto_refresh=False, transient=True) as view:
            yield lambda progress: view.update(display.live(progress), refresh=True)
    else:
        yield _PhaseByPhase().show


class _PhaseByPhase:
    """Prints each phase once."""

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()

    def show(self, progress: Progress) -> None:
        key = (progress.lesson, progress.phase)
        if key not in self._said:
            self._said.add(key)
            note(display.sentence(progress))


def result(taught: TrainingResult, control: TrainingResult, success: bool, seconds: float) -> dict[str, Any]:
    """The object that ``--json`` ends with. Scores at the top level are those of the trained policy."""
    return {
        "targets": TARGETS,
        "solved": taught.trained.solved,
        "mean_guesses": taught.trained.mean_guesses,
        "uniform_guesses": uniform_guesses(),
        "binary_search_guesses": binary_search_guesses(),
        "versions": len(taught.steps),
        "episodes": taught.episodes,
        "seconds": round(seconds, 3),
        "failures": taught.failures + taught.trained.failures,
        "learned": success,
        "first": asdict(taught.first),
        "control": asdict(control.trained),
        "curve": [step.mean_guesses for step in taught.steps],
    }


def _conclude(taught: TrainingResult, control: TrainingResult, success: bool, seconds: float) -> None:
    if shared().json:
        emit_line(result(taught, control, success, seconds))
        return
    table(display.COLUMNS, display.rows(taught, control))
    click.echo("")
    click.echo("Mean guesses of each batch that was trained on:")
    for line in display.curves(taught, control):
        click.echo(f"  {line}")
    click.echo("")
    rate = taught.episodes / taught.seconds
    click.echo(
        f"{len(taught.steps)} versions from {taught.episodes} episodes ({rate:.0f}/s), "
        f"{taught.failures} failures, {seconds:.0f} s in all."
    )


def _look_around(stage: DemoStage) -> None:
    newest = next(iter(stage.client.trajectories("guess", page=1)), None)
    if shared().json:
        emit_line({"url": stage.url})
        return
    click.echo(f"\nStill running. Page: {stage.url}/  Ctrl-C ends it.")
    click.echo(f"  headrace top --url {stage.url}")
    click.echo(f"  headrace trajectories list guess --url {stage.url}")
    if newest is not None:
        click.echo(f"  headrace trajectories show {newest.id} --url {stage.url}")
