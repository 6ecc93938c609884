"""The rg family with the real package, and the contract of its module."""

import random
import subprocess
import sys

import numpy as np
import pytest

import headrace
from headrace.errors import EnvironmentFailure, InvalidRequest, MissingExtra, SetupError, UnknownEnvironment
from headrace_workers.environments import reasoning_gym
from headrace_workers.environments.reasoning_gym import HASH_DEPENDENT, ReasoningGym, draw_task
from headrace_workers.environments.reasoning_gym_scores import (
    EXPRESSION_DATASETS,
    LITERAL_DATASETS,
    is_expression,
    score,
)

pytestmark = pytest.mark.component("reasoning-gym")

HASHES_ARE_FIXED = not sys.flags.hash_randomization


def in_new_process(code: str, hash_seed: str) -> str:
    environment = {"PYTHONHASHSEED": hash_seed, "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_package_is_imported_when_the_first_environment_of_the_family_is_made_never_before():
    code = (
        "import sys, headrace, headrace_workers.environments\n"
        "assert 'rg:*' in headrace.registered()\n"
        "headrace.make('game:Nim-v0')\n"
        "assert 'reasoning_gym' not in sys.modules\n"
        "headrace.make('rg:leg_counting')\n"
        "assert 'reasoning_gym' in sys.modules\n"
    )
    in_new_process(code, "random")


def test_without_the_package_making_one_raises_missing_extra_with_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtra, match=r"headrace\[reasoning-gym\]"):
        ReasoningGym("leg_counting")


def test_one_task_per_seed():
    environment = headrace.make("rg:leg_counting")
    questions = [environment.reset(seed)[0] for seed in range(20)]
    assert [headrace.make("rg:leg_counting").reset(seed)[0] for seed in range(20)] == questions
    assert len(set(questions)) == 20


def test_every_dataset_gives_the_same_tasks_in_another_process():
    code = (
        "import hashlib, sys\n"
        "from headrace_workers.environments.reasoning_gym import ReasoningGym, HASH_DEPENDENT, import_package\n"
        "names = sorted(set(import_package().DATASETS) - HASH_DEPENDENT - {'composite'})\n"
        "tasks = [ReasoningGym(name).reset(seed) for name in names for seed in (0, 1)]\n"
        "print('\\n', len(names), hashlib.sha256(repr(tasks).encode()).hexdigest())\n"
    )
    first, second = in_new_process(code, "1"), in_new_process(code, "2")
    assert first == second
    assert int(first.split()[-2]) >= 90  # some datasets print dots first


async def test_the_answer_is_the_last_boxed_and_without_one_the_episode_ends_with_a_format_error():
    environment = ReasoningGym("leg_counting")
    question, _ = environment.reset(3)
    assert "\\boxed{answer}" in question
    answer = environment._entry["answer"]
    step = await environment.step(f"\\boxed{{0}} or \\boxed{{{answer}}}")
    assert (step.reward, step.terminated, step.truncated) == (1.0, True, False)
    environment.reset(3)
    assert (await environment.step(str(answer))).reward == -0.1
    with pytest.raises(EnvironmentFailure):
        await environment.step("again")


def test_the_reward_is_the_datasets_score_from_0_to_1():
    assert 0.0 < score("propositional_logic", {}, 3, "nonsense") < 1.0


async def test_an_answer_that_the_grader_cannot_parse_earns_0():
    environment = ReasoningGym("prime_factorization")
    environment.reset(0)
    step = await environment.step("\\boxed{nonsense}")
    assert (step.reward, step.info["outcome"]) == (0.0, "unreadable")


async def test_an_answer_that_exhausts_the_grader_earns_0_under_its_own_name(monkeypatch):
    monkeypatch.setattr(reasoning_gym, "SCORER_S", 0.5)
    environment = ReasoningGym("coin_flip")
    environment.reset(0)
    step = await environment.step("\\boxed{1e999999999}")
    assert (step.reward, step.info["reward_parts"]) == (0.0, {"grader_exhausted": 0.0})


async def test_a_grader_that_cannot_parse_its_own_answer_is_a_failure(monkeypatch):
    def broken(self, answer, entry):
        raise KeyError("no table")

    monkeypatch.setattr(type(draw_task("leg_counting", {}, 0)[0]), "score_answer", broken)
    reason = score("leg_counting", {}, 0, "4")
    assert reason == "KeyError('no table')"

    class BrokenGrader:
        async def bounded(self, *arguments, **limits):
            return reason

    environment = ReasoningGym("leg_counting")
    environment.environment_context = BrokenGrader()
    environment.reset(0)
    with pytest.raises(EnvironmentFailure, match="no table") as caught:
        await environment.step("\\boxed{4}")
    assert (caught.value.kind, caught.value.retryable) == ("grader-error", False)


@pytest.mark.parametrize(
    "dataset", sorted((EXPRESSION_DATASETS | LITERAL_DATASETS) - (set() if HASHES_ARE_FIXED else HASH_DEPENDENT))
)
def test_an_answer_is_never_evaluated_as_a_program(dataset, tmp_path):
    mark = tmp_path / "evaluated"
    assert score(dataset, {}, 3, f"open({str(mark)!r}, 'w')") in (0.0, 0.01, 0.05)
    assert not mark.exists()


def test_lists_and_expressions_are_scored_as_before():
    _, entry = draw_task("n_queens", {}, 3)
    rows = [row.split() for row in entry["metadata"]["valid_answers"][0].split("\n")]
    assert score("n_queens", {}, 3, repr(rows)) == 0.5
    _, entry = draw_task("puzzle24", {}, 3)
    assert score("puzzle24", {}, 3, entry["answer"]) == 1.0


@pytest.mark.parametrize("text", ["x**2/2 + C", "sin(2*x)*exp(-x)", "-3.5 * (x^2)", "log(x)/sqrt(pi)"])
def test_an_expression_has_numbers_operators_variables_and_known_functions(text):
    assert is_expression(text)


@pytest.mark.parametrize("text", ["exit()", "x.__class__", "chr(40)", "[1]", "'a'", "a_b", "x\x00", "input(1)", "x;y"])
def test_anything_else_is_not_an_expression(text):
    assert not is_expression(text)


async def test_the_package_and_its_datasets_leave_the_global_generators_unchanged():
    before = random.getstate(), np.random.get_state()[1].tolist()
    environment = ReasoningGym("pool_matrix")
    environment.reset(0)
    await environment.step("\\boxed{1}")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


@pytest.mark.skipif(HASHES_ARE_FIXED, reason="this process hashes strings with a fixed seed")
def test_datasets_that_depend_on_the_hash_seed_of_the_process_are_refused_unless_it_is_fixed():
    for name in HASH_DEPENDENT:
        with pytest.raises(SetupError, match="PYTHONHASHSEED=0"):
            ReasoningGym(name)
    code = (
        "from headrace_workers.environments.reasoning_gym import ReasoningGym, HASH_DEPENDENT\n"
        "print([ReasoningGym(name).reset(1) for name in sorted(HASH_DEPENDENT)])\n"
    )
    assert in_new_process(code, "0") == in_new_process(code, "0")


def test_an_unknown_dataset_and_a_wrong_configuration_are_refused():
    with pytest.raises(UnknownEnvironment, match="leg_counting"):
        headrace.make("rg:leg_count")
    with pytest.raises(InvalidRequest, match="no_such_field"):
        headrace.make("rg:leg_counting", no_such_field=1)
    with pytest.raises(InvalidRequest):
        headrace.make("rg:leg_counting", min_animals=0)


def test_an_environment_of_the_family_may_block():
    assert reasoning_gym.ReasoningGym.blocking
