"""Prompts in the form in which a worker sends them."""

from collections.abc import Sequence

from headrace.trajectory import Message
from headrace_workers.environments.arithmetic import Arithmetic
from headrace_workers.environments.guess_the_number import GuessTheNumber
from headrace_workers.environments.nim import Nim
from headrace_workers.renderers.bytes_renderer import END, BytesRenderer

RENDERER = BytesRenderer()


def prompt_of(*texts: str) -> list[int]:
    """A conversation in which user and assistant take turns, the user first."""
    roles = ("user", "assistant")
    messages = [Message(role=roles[at % 2], content=text) for at, text in enumerate(texts)]
    return RENDERER.start(messages).new_ids


def sampled(text: str) -> list[int]:
    return [*text.encode(), END]


def guessing(guesses: Sequence[int] = (), target: int = 20) -> list[int]:
    """A game of 1 to 50 after these wrong guesses."""
    environment = GuessTheNumber(1, 50, 30, target=target)
    texts = [environment.reset(0)[0]]
    for guess in guesses:
        action = f"\\boxed{{{guess}}}"
        texts += [action, str(environment.step(action).observation)]
    return prompt_of(*texts)


def nim(*heaps: int) -> list[int]:
    environment = Nim(heaps=heaps)
    return prompt_of(str(environment.reset(0)[0]["player_0"]))


def arithmetic(**kwargs) -> list[int]:
    return prompt_of(str(Arithmetic(**kwargs).reset(0)[0]))


UNKNOWN = prompt_of("How do you do?")

ALL = {
    "guess": guessing([10, 40]),
    "guess-one-left": guessing([19, 21]),
    "nim": nim(2, 0, 4),
    "nim-large": nim(1, 7),
    "sum": arithmetic(operations="+", max_operand=9),
    "other-arithmetic": arithmetic(operations="*", terms=3),
    "unknown": UNKNOWN,
}
