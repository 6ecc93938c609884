"""``headrace demo``: train a tiny policy to guess a number, and a control that must not learn."""

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
from headrace.server.option_types import SecondsRange
from headrace_orchestrator.cli.demo import display
from headrace_orchestrator.cli.demo.processes import DemoService, demo_service
from headrace_orchestrator.cli.demo.scores import TARGETS, binary_search_guesses, has_learned, uniform_guesses
from headrace_orchestrator.cli.demo.trainer import Progress, Trainer, TrainingResult
from headrace_orchestrator.cli.output import FAILED, emit_line, json_option, note, notes, shared, table
from headrace_orchestrator.cli.up import CHECK_INTERVAL_S, interruptible_sleep, stop_signal

VERSIONS = 40
"""Default number of learner steps: enough to play like a binary search."""

SECONDS = 90.0
"""Default time limit of the whole demo."""


@click.command(short_help="Train a tiny policy to guess a number, from nothing.")
@click.option("--versions", default=VERSIONS, show_default=True, type=click.IntRange(1, 9999), help="Learner steps.")
@click.option("--seconds", default=SECONDS, show_default=True, type=SecondsRange(1), help="Time limit of the demo.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for the data. Default: a temporary one.",
)
@click.option("--keep", is_flag=True, help="Keep running afterwards until Ctrl-C, for exploration.")
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
    with stop_signal() as stop, _directory(data) as directory:
        sleep = interruptible_sleep(stop)
        with demo_service(directory, sleep) as service:
            with _progress_display() as show:
                trainer = Trainer(service, versions=versions, deadline=started + seconds, show=show, sleep=sleep)
                training = trainer.train("guess", zero_advantages=False)
                control = trainer.train("control", zero_advantages=True)
            success = has_learned(training.first, training.trained, control.trained)
            _print_result(training, control, success, time.monotonic() - started)
            if keep:
                _print_hints(service)
                while not stop.wait(CHECK_INTERVAL_S):
                    service.supervisor.poll()
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
def _progress_display() -> Iterator[Callable[[Progress], None]]:
    """A live view on a terminal, a line per phase when piped, nothing with --json."""
    if shared().json:
        yield lambda progress: None
    elif notes().is_terminal:
        with Live(console=notes(), auto_refresh=False, transient=True) as view:
            yield lambda progress: view.update(display.live(progress), refresh=True)
    else:
        yield _PhaseLines().show


class _PhaseLines:
    """Prints each phase once."""

    def __init__(self) -> None:
        self._printed: set[tuple[str, str]] = set()

    def show(self, progress: Progress) -> None:
        key = (progress.run, progress.phase)
        if key not in self._printed:
            self._printed.add(key)
            note(display.sentence(progress))


def result(training: TrainingResult, control: TrainingResult, success: bool, seconds: float) -> dict[str, Any]:
    """The last object of ``--json``. Its top-level scores are those of the trained policy."""
    return {
        "targets": TARGETS,
        "solved": training.trained.solved,
        "mean_guesses": training.trained.mean_guesses,
        "uniform_guesses": uniform_guesses(),
        "binary_search_guesses": binary_search_guesses(),
        "versions": len(training.steps),
        "episodes": training.episodes,
        "seconds": round(seconds, 3),
        "failures": training.failures + training.trained.failures,
        "learned": success,
        "first": asdict(training.first),
        "control": asdict(control.trained),
        "curve": [step.mean_guesses for step in training.steps],
    }


def _print_result(training: TrainingResult, control: TrainingResult, success: bool, seconds: float) -> None:
    if shared().json:
        emit_line(result(training, control, success, seconds))
        return
    table(display.COLUMNS, display.rows(training, control))
    click.echo("")
    click.echo("Mean guesses of each trained batch:")
    for line in display.curves(training, control):
        click.echo(f"  {line}")
    click.echo("")
    rate = training.episodes / training.seconds
    click.echo(
        f"{len(training.steps)} versions from {training.episodes} episodes ({rate:.0f}/s), "
        f"{training.failures} failures, {seconds:.0f} s in all."
    )


def _print_hints(service: DemoService) -> None:
    newest = next(iter(service.client.trajectories("guess", page=1)), None)
    if shared().json:
        emit_line({"url": service.url})
        return
    click.echo(f"\nStill running. Page: {service.url}/  Ctrl-C ends it.")
    click.echo(f"  headrace top --url {service.url}")
    click.echo(f"  headrace trajectories list guess --url {service.url}")
    if newest is not None:
        click.echo(f"  headrace trajectories show {newest.id} --url {service.url}")
