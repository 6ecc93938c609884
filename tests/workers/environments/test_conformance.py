"""The conformance checks accept environments that keep the protocol, and name each violation."""

import asyncio
import math
import random
import sys
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.assets import Image
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import PythonProgram
from headrace_workers.environments.conformance import check_environment

GUESSES = (*(f"\\boxed{{{number}}}" for number in (25, 12, 37, 6, 44, 25, 99)), "no guess")


@pytest.mark.parametrize(
    ("name", "kwargs", "actions"),
    [
        ("game:GuessTheNumber-v0-easy", {}, GUESSES),
        ("game:GuessTheNumber-v0-hard", {}, GUESSES),
        ("game:GuessTheNumber-v0-random", {}, GUESSES),
        ("game:GuessTheNumber-v0", {"max_turns": 30}, GUESSES),
        ("game:Nim-v0", {}, ("\\boxed{1 1}", "\\boxed{2 1}", "\\boxed{3 1}", "\\boxed{2 3}", "?")),
        ("math:Arithmetic-v0", {"operations": "+-*/"}, ("\\boxed{4}", "4")),
        pytest.param("rg:leg_counting", {}, ("\\boxed{4}", "4"), marks=pytest.mark.component("reasoning-gym")),
    ],
)
def test_built_in_environments_keep_the_protocol(name, kwargs, actions):
    assert check_environment(lambda: headrace.make(name, **kwargs), actions=actions) == []


class Echo:
    """Environment that ends after three steps; each subclass has one violation."""

    def reset(self, seed=None):
        self.seed, self.turn = seed, 0
        return f"seed {seed}", {}

    def step(self, action):
        self.turn += 1
        return f"{self.seed} {self.turn} {action}", 0.5, self.turn == 3, False, {}


class AsyncEcho(Echo):
    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)


def test_an_environment_with_coroutines_keeps_the_protocol():
    assert check_environment(AsyncEcho) == []


class NoInfo(Echo):
    def reset(self, seed=None):
        return super().reset(seed)[0]


class FourValues(Echo):
    def step(self, action):
        return super().step(action)[:4]


class NaNReward(Echo):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float("nan"), *rest


class IntFlag(Echo):
    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, int(terminated), False, info


class BytesObservation(Echo):
    def step(self, action):
        observation, *rest = super().step(action)
        return observation.encode(), *rest


class DrawsGlobally(Echo):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, random.random(), *rest


class SeedsGlobally(Echo):
    def reset(self, seed=None):
        random.seed(seed)
        return super().reset(seed)


class ForgetsToReset(Echo):
    def __init__(self):
        self.total = 0

    def step(self, action):
        self.total += 1
        observation, *rest = super().step(action)
        return f"{observation} {self.total}", *rest


class OneInfo(Echo):
    """G19, first variant: info is one dict, updated in place."""

    def __init__(self):
        self.info = {}

    def step(self, action):
        *rest, _ = super().step(action)
        self.info["turn"] = self.turn
        return *rest, self.info


class SharedList(Echo):
    """G19, third variant: the messages are a class attribute that instances share."""

    messages: list[str] = []  # noqa: RUF012 - the defect

    def reset(self, seed=None):
        self.messages.clear()
        return super().reset(seed)

    def step(self, action):
        observation, *rest = super().step(action)
        self.messages.append(observation)
        return " ".join(self.messages), *rest


class ImageOfFloats(Echo):
    def step(self, action):
        _, *rest = super().step(action)
        return [Image(data=np.zeros((2, 2)))], *rest


class OneBuffer(Echo):
    """G19, second variant: one image buffer, drawn into at each step."""

    def __init__(self):
        self.buffer = np.zeros((2, 2), np.uint8)

    def reset(self, seed=None):
        self.buffer[:] = 0
        return super().reset(seed)

    def step(self, action):
        _, *rest = super().step(action)
        self.buffer += 1
        return [Image(data=self.buffer)], *rest


class FreshImages(OneBuffer):
    def step(self, action):
        _, *rest = super().step(action)
        return [Image(data=self.buffer.copy())], *rest


class Raises(Echo):
    def step(self, action):
        raise ZeroDivisionError


class NobodyDue(Echo):
    agents = ("a", "b")

    def next_agent(self):
        return "c"

    def reset(self, seed=None):
        return {"a": "", "b": ""}, {}


class Ends(Echo):
    def step(self, action):
        sys.exit(3)


class PartsThatAreNoNumbers(Echo):
    def step(self, action):
        return "", 1.0, True, False, {"reward_parts": {"speed": math.inf}}


class HalfACharacter(Echo):
    def reset(self, seed=None):
        return "\ud800", {}


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (NoInfo, "reset-returns"),
        (FourValues, "step-returns"),
        (NaNReward, "step-returns"),
        (IntFlag, "step-returns"),
        (BytesObservation, "step-returns"),
        (DrawsGlobally, "global-generators"),
        (DrawsGlobally, "seed-fixes-all"),
        (SeedsGlobally, "global-generators"),
        (ForgetsToReset, "seed-fixes-all"),
        (OneInfo, "fresh-objects"),
        (SharedList, "own-state"),
        (ImageOfFloats, "step-returns"),
        (OneBuffer, "fresh-objects"),
        (Raises, "raises"),
        (Ends, "raises"),
        (PartsThatAreNoNumbers, "step-returns"),
        (HalfACharacter, "reset-returns"),
        (NobodyDue, "next-agent"),
    ],
)
def test_each_violation_is_found_under_its_name(broken, check):
    problems = check_environment(broken)
    assert check in {problem.check for problem in problems}, problems
    assert all(str(problem) for problem in problems)


def test_an_environment_of_images_keeps_the_protocol():
    assert check_environment(FreshImages) == []


def test_the_global_generators_are_restored():
    state = random.getstate()
    check_environment(Echo)
    assert random.getstate() == state


@pytest.mark.component("bubblewrap")
def test_an_environment_that_runs_programs_has_a_sandbox_in_the_check():
    class Runs:
        environment_context: Any = None

        def reset(self, seed=None):
            return "Write a program.", {}

        async def step(self, action):
            result = await self.environment_context.sandbox.run_code(
                PythonProgram(code="print(6 * 7)"), Limits(wall_s=20)
            )
            return result.stdout.text, 1.0, True, False, {}

    assert check_environment(Runs, seeds=[0], actions=["x"]) == []


class GradedEcho(Echo):
    def grade(self):
        return self.turn / 4, {"reward_parts": {"turns": self.turn / 4}}


def test_an_environment_with_a_grade_keeps_the_protocol():
    assert check_environment(GradedEcho) == []


@pytest.mark.parametrize(
    ("grade", "check"),
    [
        (lambda environment: "1", "grade-returns"),
        (lambda environment: math.inf, "grade-returns"),
        (lambda environment: (1.0, {}, {}), "grade-returns"),
        (lambda environment: (1.0, []), "grade-returns"),
        (lambda environment: (1.0, {"reward_parts": {"a": "b"}}), "grade-returns"),
        (lambda environment: 1 / 0, "raises"),
        (lambda environment: id(environment), "seed-fixes-all"),
        (lambda environment: environment.turn / (2 - environment.turn), "raises"),  # only late in an episode
    ],
)
def test_a_grade_that_breaks_the_protocol_is_named(grade, check):
    class Graded(Echo):
        def grade(self):
            return grade(self)

    kept = []  # so that no two instances have the same id

    def make():
        kept.append(Graded())
        return kept[-1]

    assert {problem.check for problem in check_environment(make)} == {check}
