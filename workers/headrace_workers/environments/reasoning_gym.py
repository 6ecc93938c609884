r"""The datasets of the ``reasoning-gym`` package as single-turn environments, ``rg:<dataset>``.

* The package is imported when the first environment of the family is made, never before.
* Without the package, making one raises MissingExtra and says what to install.
* One task per seed: the dataset is built with that seed, and its first item is the question.
* The answer is the last ``\boxed{...}``; without one the episode ends at a format error.
* The reward is the dataset's own score, a fraction from 0 to 1.
* An answer that the grader cannot read earns 0; a grader that cannot read its own answer is a failure.
* The package and its datasets leave the global generators as they were.
* Datasets that depend on the hash seed of the process are refused unless it is fixed.
"""

from __future__ import annotations

import importlib
import random
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from headrace.environment import Step
from headrace.errors import EnvironmentFailure, InvalidRequest, MissingExtra, SetupError, UnknownEnvironment
from headrace_workers.environments.answers import FORMAT_ERROR, last_boxed
from headrace_workers.environments.call_order import out_of_order

HASH_DEPENDENT = frozenset(
    {
        "intermediate_integration",
        "isomorphic_strings",
        "knight_swap",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    }
)
"""Datasets of the package that walk sets of strings while they draw: two processes agree on a task only if both hash
strings alike."""

_generators = threading.Lock()
"""Held while the package works: some of its datasets use the global random generators."""


class ReasoningGym:
    """One dataset; ``config`` is the dataset's own configuration, such as ``min_digits=3``.

    Making it imports the package (seconds, once in a process) and some datasets read files, so it may block.
    """

    blocking: ClassVar[bool] = True

    def __init__(self, dataset: str, **config: Any) -> None:
        self._factory = _import_package()
        if dataset not in self._factory.DATASETS:
            raise UnknownEnvironment(
                f"reasoning-gym has no dataset {dataset!r}.",
                hint=f"It has {', '.join(sorted(self._factory.DATASETS))}.",
                environment=f"rg:{dataset}",
            )
        if dataset in HASH_DEPENDENT and sys.flags.hash_randomization:
            raise SetupError(
                f"The tasks of rg:{dataset} depend on how this process hashes strings, so its seed does not fix them.",
                hint="Start every worker with PYTHONHASHSEED=0.",
            )
        self._dataset_name = dataset
        self._config = self._checked(config)
        self._entry: dict[str, Any] | None = None

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Build the dataset with this seed and ask its first question."""
        seed = random.Random().getrandbits(31) if seed is None else seed % 2**31
        with _own_generators(seed):
            self._dataset = self._factory.create_dataset(self._dataset_name, size=1, seed=seed, **self._config)
            entry: dict[str, Any] = self._dataset[0]
        self._entry = entry
        question = f"{entry['question']}\n\nWrite your final answer like this: \\boxed{{answer}}"
        return question, {"dataset": self._dataset_name}

    def step(self, action: str) -> Step:
        """Score the answer; the episode ends."""
        if self._entry is None:
            raise out_of_order(self)
        entry, self._entry = self._entry, None
        answer = last_boxed(action)
        if answer is None:
            return _end("No answer in the form \\boxed{answer} was found.", "format_error", FORMAT_ERROR)
        try:
            return _end("Answer received.", "score", self._score(answer, entry))
        except Exception as error:  # noqa: BLE001 - graders of the package raise whatever parsing the answer raises
            self._must_grade_itself(entry, error)
            return _end("The answer could not be read.", "unreadable", 0.0)

    def _checked(self, config: dict[str, Any]) -> dict[str, Any]:
        _, config_class = self._factory.DATASETS[self._dataset_name]
        try:
            made = config_class(size=1, seed=0, **config)
            if hasattr(made, "validate"):
                made.validate()
        except (AssertionError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"rg:{self._dataset_name} does not take the configuration {config}: {error}",
                hint="The kwargs of an rg environment are the fields of the dataset's configuration.",
            ) from error
        return config

    def _score(self, answer: str, entry: dict[str, Any]) -> float:
        with _own_generators(0):
            return float(self._dataset.score_answer(answer, entry))

    def _must_grade_itself(self, entry: dict[str, Any], error: Exception) -> None:
        """The answer is to blame only if the grader works on the reference answer."""
        try:
            self._score(entry["answer"], entry)
        except Exception as own:
            raise EnvironmentFailure(
                f"The grader of rg:{self._dataset_name} fails on its own answer: {own!r}; on the policy's: {error!r}.",
                kind="grader-error",
                retryable=False,
            ) from own


def _end(observation: str, outcome: str, reward: float) -> Step:
    return Step(observation, reward, True, False, {"outcome": outcome, "reward_parts": {outcome: reward}})


def _import_package() -> Any:
    try:
        with _own_generators(0), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the package and its needs warn about their own syntax when first compiled
            importlib.import_module("reasoning_gym")
            return importlib.import_module("reasoning_gym.factory")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "The rg environments need the package reasoning-gym, which is not installed here.",
            hint="Install headrace[reasoning-gym] where the workers run.",
        ) from error


@contextmanager
def _own_generators(seed: int) -> Iterator[None]:
    """Let the package use the global generators, seeded, and put them back as they were."""
    with _generators:
        python_state, numpy_state = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
