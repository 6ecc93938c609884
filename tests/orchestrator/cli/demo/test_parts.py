"""The parts of the demo that need no processes: baselines, scores, verdict, plot, and output."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import SetupError
from headrace.trajectory import Failure, Task
from headrace.wire import messages
from headrace_orchestrator.cli.demo import display
from headrace_orchestrator.cli.demo.command import result
from headrace_orchestrator.cli.demo.processes import JsonLines, example
from headrace_orchestrator.cli.demo.scores import (
    EVALUATION_TURNS,
    Score,
    binary_search_guesses,
    evaluation_tasks,
    has_learned,
    score,
    uniform_guesses,
)
from headrace_orchestrator.cli.demo.trainer import Progress, TrainedVersion, TrainingResult


def test_baselines_are_computed_exactly() -> None:
    assert uniform_guesses(1) == binary_search_guesses(1) == 1.0
    assert uniform_guesses(2) == binary_search_guesses(2) == 1.5
    assert round(uniform_guesses(50), 2) == 6.18
    assert binary_search_guesses(50) == 4.86


def test_the_uniform_baseline_agrees_with_play() -> None:
    rng = random.Random(0)

    def play(secret: int, low: int, high: int) -> int:
        for count in itertools.count(1):
            guess = rng.randint(low, high)
            if guess == secret:
                return count
            low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
        raise AssertionError

    games = 20_000
    mean = sum(play(rng.randint(1, 50), 1, 50) for _ in range(games)) / games
    assert abs(mean - uniform_guesses(50)) < 0.1


def test_the_binary_search_baseline_agrees_with_play() -> None:
    def guesses(secret: int, low: int, high: int) -> int:
        middle = (low + high) // 2
        if middle == secret:
            return 1
        return 1 + (guesses(secret, middle + 1, high) if middle < secret else guesses(secret, low, middle - 1))

    assert sum(guesses(secret, 1, 50) for secret in range(1, 51)) / 50 == binary_search_guesses(50)


def test_an_evaluation_has_one_task_for_each_target_and_a_limit_of_guesses() -> None:
    tasks = evaluation_tasks()
    assert [task["kwargs"]["target"] for task in tasks] == list(range(1, 51))
    assert {task["kwargs"]["max_turns"] for task in tasks} == {EVALUATION_TURNS} == {15}


def episode(reward: float | None, turns: int) -> messages.EvaluationEpisode:
    failure = None if reward is not None else Failure(layer="policy", kind="refused", message="503")
    return messages.EvaluationEpisode(
        episode="e",
        task=Task(environment="e", seed=0),
        status="finished" if reward is not None else "failed",
        reward=reward,
        turns=turns,
        failure=failure,
    )


def test_a_failed_episode_is_a_failure_and_neither_a_guess_nor_a_miss() -> None:
    reply = messages.EvaluationReply(
        epoch=1,
        evaluation="e",
        version="0.0",
        wanted=4,
        done=4,
        finished=True,
        hold_s=0.0,
        episodes=[episode(1.0, 3), episode(0.0, 15), episode(None, 1), episode(1.0, 6)],
    )
    assert score(reply) == Score(targets=4, solved=2, mean_guesses=8.0, failures=1)


FIRST = Score(targets=50, solved=20, mean_guesses=12.0, failures=0)
TRAINED = Score(targets=50, solved=50, mean_guesses=4.9, failures=0)


def test_a_policy_has_learned_only_if_training_and_not_the_control_improved_its_score() -> None:
    assert has_learned(FIRST, TRAINED, FIRST)
    assert not has_learned(FIRST, FIRST, FIRST)
    assert not has_learned(FIRST, replace(TRAINED, solved=49), FIRST)
    assert not has_learned(FIRST, replace(TRAINED, mean_guesses=6.2), FIRST)
    assert not has_learned(FIRST, TRAINED, replace(FIRST, mean_guesses=11.0))
    assert not has_learned(FIRST, replace(TRAINED, failures=1), FIRST)


def training_of(run: str, trained: Score, guesses: list[float]) -> TrainingResult:
    steps = [TrainedVersion(version=f"0.{n}", mean_reward=0.5, mean_guesses=mean) for n, mean in enumerate(guesses, 1)]
    return TrainingResult(run=run, first=FIRST, trained=trained, steps=steps, episodes=640, failures=0, seconds=20.0)


def test_the_last_json_object_has_the_trained_scores_and_the_baselines() -> None:
    training, control = (
        training_of("guess", TRAINED, [9.0, 7.0, 5.0]),
        training_of("control", FIRST, [9.0, 9.0]),
    )
    output: dict[str, Any] = json.loads(json.dumps(result(training, control, True, 41.5)))
    assert {
        name: output[name] for name in ("targets", "solved", "mean_guesses", "versions", "episodes", "failures")
    } == {
        "targets": 50,
        "solved": 50,
        "mean_guesses": 4.9,
        "versions": 3,
        "episodes": 640,
        "failures": 0,
    }
    assert (output["seconds"], output["learned"]) == (41.5, True)
    assert (round(output["uniform_guesses"], 2), output["binary_search_guesses"]) == (6.18, 4.86)
    assert output["control"]["mean_guesses"] == 12.0


def test_the_table_has_three_players_and_two_baselines() -> None:
    rows = display.rows(training_of("guess", TRAINED, [5.0]), training_of("control", FIRST, [9.0]))
    assert [row[1:] for row in rows] == [
        ["20/50", "12.00"],
        ["50/50", "4.90"],
        ["20/50", "12.00"],
        ["computed", "6.18"],
        ["computed", "4.86"],
    ]


def test_the_plot_has_a_bar_for_each_version_on_one_scale() -> None:
    assert display.sparkline([], low=0.0, high=1.0) == ""
    assert display.sparkline([3.0, 3.0], low=3.0, high=3.0) == "▁▁"
    assert display.sparkline([9.0, 5.0, 2.0, 11.0, 1.0], low=2.0, high=9.0) == "█▄▁█▁"
    assert display.curves(training_of("guess", TRAINED, [9.0, 2.0]), training_of("control", FIRST, [9.0, 9.0])) == [
        "guess    9.00 █▁ 2.00",
        "control  9.00 ██ 9.00",
    ]


def test_the_live_line_shows_what_the_learner_waits_on() -> None:
    progress = Progress(run="guess", phase="training", episodes_per_s=33.3, waits_on="collecting")
    progress.steps.append(TrainedVersion(version="0.4", mean_reward=0.75, mean_guesses=6.5))
    line = "guess: training, version 0.4, reward 0.75, 6.5 guesses, 33 episodes/s, the learner waits on collecting"
    assert display.sentence(progress) == line
    assert display.live(progress).plain == line + "\n█"


def test_complete_json_lines_of_a_log_are_read_once(tmp_path: Path) -> None:
    file = tmp_path / "learner.log"
    lines = JsonLines(file)
    assert lines.read() == []
    file.write_text('{"version": "0.1"}\nWarning: not JSON\n{broken\n{"version":')
    assert lines.read() == [{"version": "0.1"}]
    assert lines.read() == []
    with file.open("a") as stream:
        stream.write(' "0.2"}\n')
    assert lines.read() == [{"version": "0.2"}]


def test_an_example_that_is_not_installed_is_named() -> None:
    with pytest.raises(SetupError, match=r"nothing\.py is not installed"):
        example("nothing.py")
