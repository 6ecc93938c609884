"""Rules of the arithmetic environment, and the contract of its module."""

import ast
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import EnvironmentFailure, InvalidRequest
from headrace_workers.environments.answers import last_boxed
from headrace_workers.environments.arithmetic import Arithmetic, read_number


def value_of(expression: str) -> Fraction:
    """Evaluate an environment's question independently."""

    def evaluate(node):
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        left, right = evaluate(node.left), evaluate(node.right)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
        return left / right

    return evaluate(ast.parse(expression, mode="eval").body)


@given(st.integers(0, 2**32), st.integers(2, 5))
def test_a_correct_answer_earns_1_any_other_0(seed, terms):
    environment = Arithmetic(terms=terms, operations="+-*/")
    question, info = environment.reset(seed)
    assert info["expression"] in question
    value = value_of(info["expression"])
    step = environment.step(f"So \\boxed{{{value}}}")
    assert (step.reward, step.terminated, step.truncated) == (1.0, True, False)
    environment.reset(seed)
    assert environment.step(f"\\boxed{{{value + 1}}}").reward == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("-7", -7),
        ("−7", -7),
        ("+7", 7),
        (" 3 / 4 ", Fraction(3, 4)),
        ("6/8", Fraction(3, 4)),
        ("0.75", Fraction(3, 4)),
        (".75", Fraction(3, 4)),
        ("3.", 3),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("-\\dfrac{3}{4}", Fraction(-3, 4)),
        ("0.1", Fraction(1, 10)),
    ],
)
def test_grading_is_exact(text, value):
    assert read_number(text) == value


@pytest.mark.parametrize(
    "text", ["", "seven", "1/0", "\\frac{1}{0}", "1e999999999", "1/2/3", "nan", "inf", "1_000", "9" * 10**6, "0x10"]
)
def test_an_answer_that_is_not_a_number_is_wrong(text):
    assert read_number(text) is None


def test_a_third_is_not_a_decimal():
    assert read_number("0.3333333333333333") != read_number("1/3")


def test_without_a_boxed_answer_the_episode_ends_with_a_format_error():
    environment = Arithmetic()
    environment.reset(0)
    step = environment.step("42")
    assert (step.reward, step.terminated) == (-0.1, True)
    with pytest.raises(EnvironmentFailure):
        environment.step("\\boxed{42}")


@given(st.integers(0, 2**32))
def test_the_seed_determines_the_expression(seed):
    assert Arithmetic(terms=4).reset(seed) == Arithmetic(terms=4).reset(seed)


@pytest.mark.parametrize("kwargs", [{"terms": 1}, {"max_operand": 0}, {"operations": ""}, {"operations": "%"}])
def test_kwargs_that_cannot_make_an_expression_are_refused(kwargs):
    with pytest.raises(InvalidRequest):
        Arithmetic(**kwargs)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\boxed{1} \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} \\boxed{2", "1"),
        ("\\boxed {3}", "3"),
        ("nothing", None),
        ("\\boxed{", None),
        ("\\boxed{\\boxed{4}}", "4"),
        ("\\boxed{1} \\boxed{ \\boxed{ {", "1"),
        ("} \\boxed{1}} \\boxed{2}", "2"),
        ("\\boxed{" * 100_000, None),
        ("\\boxed{7}" + "{" * 100_000, "7"),
        ("\\boxed" + " " * 100_000, None),
    ],
)
def test_the_last_boxed_counts_and_braces_inside_it_are_matched(text, found):
    assert last_boxed(text) == found
