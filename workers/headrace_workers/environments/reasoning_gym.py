r"""Datasets of the ``reasoning-gym`` package as single-turn environments, ``rg:<dataset>``.

* The package is imported when the first environment of the family is made, never before.
* Without the package, making an environment raises MissingExtra with the package to install.
* One task per seed: the dataset is built with that seed, and its first item is the question.
* The answer is the last ``\boxed{...}``; without one the episode ends with a format error.
* The reward is the dataset's score, from 0 to 1.
* An answer is scored in a separate process with a deadline and a memory limit, and never evaluated as a program.
* An answer that the grader cannot parse earns 0; a grader that cannot parse its own answer is a failure.
* An answer that exhausts the grader earns 0, under its own name in ``reward_parts``.
* The package and its datasets leave the global generators unchanged.
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
from headrace_workers.bounded_calls import LimitExceeded
from headrace_workers.environment_context import LOCAL_CONTEXT, EnvironmentContext
from headrace_workers.environments.answers import FORMAT_ERROR, final_step, last_boxed
from headrace_workers.environments.call_order import out_of_order_error

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
"""Datasets that iterate over sets of strings while drawing a task: two processes draw the same task only if both hash
strings in the same way."""

SCORER = "headrace_workers.environments.reasoning_gym_scores:score"

SCORER_S, SCORER_BYTES = 5.0, 1 << 30
"""Limits of scoring one answer."""

_generators = threading.RLock()
"""Lock around calls of the package: some datasets use the global random generators."""


class ReasoningGym:
    """An environment of one dataset; ``config`` is the dataset's configuration, such as ``min_digits=3``.

    It may block: the first environment imports the package, which takes seconds, and some datasets read files.
    """

    blocking: ClassVar[bool] = True

    def __init__(self, dataset: str, **config: Any) -> None:
        self._factory = import_package()
        if dataset not in self._factory.DATASETS:
            raise UnknownEnvironment(
                f"reasoning-gym has no dataset {dataset!r}.",
                hint=f"It has {', '.join(sorted(self._factory.DATASETS))}.",
                environment=f"rg:{dataset}",
            )
        if dataset in HASH_DEPENDENT and sys.flags.hash_randomization:
            raise SetupError(
                f"The tasks of rg:{dataset} depend on the hash seed of the process, not only on the episode's seed.",
                hint="Start every worker with PYTHONHASHSEED=0.",
            )
        self._dataset_name = dataset
        self._config = self._check_config(config)
        self._entry: dict[str, Any] | None = None
        self.environment_context: EnvironmentContext = LOCAL_CONTEXT

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Build the dataset with this seed and ask its first question."""
        self._seed = random.Random().getrandbits(31) if seed is None else seed % 2**31
        _, self._entry = draw_task(self._dataset_name, self._config, self._seed)
        question = f"{self._entry['question']}\n\nWrite your final answer like this: \\boxed{{answer}}"
        return question, {"dataset": self._dataset_name}

    async def step(self, action: str) -> Step:
        """Score the answer; the episode ends."""
        if self._entry is None:
            raise out_of_order_error(self)
        self._entry = None
        answer = last_boxed(action)
        if answer is None:
            return final_step("No answer in the form \\boxed{answer} was found.", "format_error", FORMAT_ERROR)
        try:
            score = await self.environment_context.bounded(
                SCORER, self._dataset_name, self._config, self._seed, answer, time_s=SCORER_S, memory_bytes=SCORER_BYTES
            )
        except LimitExceeded as exhausted:
            observation = f"The answer could not be graded: it exhausted the grader ({exhausted})."
            return final_step(observation, "grader_exhausted", 0.0)
        if isinstance(score, str):
            raise EnvironmentFailure(
                f"The grader of rg:{self._dataset_name} fails on its own answer: {score}.",
                kind="grader-error",
                retryable=False,
            )
        if score is None:
            return final_step("The answer could not be read.", "unreadable", 0.0)
        return final_step("Answer received.", "score", float(score))

    def _check_config(self, config: dict[str, Any]) -> dict[str, Any]:
        _, config_class = self._factory.DATASETS[self._dataset_name]
        try:
            checked = config_class(size=1, seed=0, **config)
            if hasattr(checked, "validate"):
                checked.validate()
        except (AssertionError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"rg:{self._dataset_name} does not take the configuration {config}: {error}",
                hint="The kwargs of an rg environment are the fields of the dataset's configuration.",
            ) from error
        return config


def draw_task(dataset_name: str, config: dict[str, Any], seed: int) -> tuple[Any, dict[str, Any]]:
    """Build a dataset with a seed; return it with its first item."""
    with isolated_generators(seed):
        dataset = import_package().create_dataset(dataset_name, size=1, seed=seed, **config)
        return dataset, dataset[0]


def import_package() -> Any:
    """The package's module with its datasets. Raises MissingExtra."""
    try:
        with isolated_generators(0), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the package's code causes syntax warnings when it is first compiled
            importlib.import_module("reasoning_gym")
            return importlib.import_module("reasoning_gym.factory")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "The rg environments need the package reasoning-gym, which is not installed.",
            hint="Install headrace[reasoning-gym] where the workers run.",
        ) from error


@contextmanager
def isolated_generators(seed: int) -> Iterator[None]:
    """Seed the global generators for the package, and restore them afterwards."""
    with _generators:
        python_state, numpy_state = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
