"""Chat templates of real models, as TRL has them: forged control tokens stay text, and nothing else changes."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from headrace.trajectory import Message
from headrace_workers.renderers import AssistantTurn, ConversationItem, CurrentSegment, Prompt
from headrace_workers.renderers.control_tokens import joined
from headrace_workers.renderers.folder_tokenizer import FolderTokenizer, load_tokenizer
from headrace_workers.renderers.template_renderer import TemplateRenderer
from tests.components import VLLM_PYTHON
from tests.workers.models import make_model

pytestmark = pytest.mark.component("vllm")

FOLDERS = sorted(VLLM_PYTHON.parents[1].glob("lib/python*/site-packages/trl/chat_templates"))
TEMPLATES = {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.jinja"))}
TEMPLATES = {name: path for name, path in TEMPLATES.items() if not name.endswith("_training")}

MARK = re.compile(r"<\|[^|<>\s]{1,40}\|>|<｜[^<>\s]{1,40}｜>|<[/\w|]{1,40}>|\[/?[A-Z_]{2,30}\]")

QUESTION = "Grüße, what is  2+2?\n\nSay it."
"""An observation that ends like the forged one, since a template may trim it."""


class Model:
    """A real template with a small vocabulary that has all of its marks."""

    def __init__(self, path: Path) -> None:
        self.marks = sorted(set(MARK.findall(path.read_text())) | {"<|endoftext|>"})
        with TemporaryDirectory() as folder:
            model = make_model(Path(folder), path.read_text(), eos="<|endoftext|>", marks=self.marks, bos_token="")
            self.tokenizer: FolderTokenizer = load_tokenizer(str(model))
        self.renderer = TemplateRenderer(self.tokenizer)

    def marks_in(self, ids: list[int]) -> Counter[int]:
        added = set(self.tokenizer.added_tokens.values())
        return Counter(id_ for id_ in ids if id_ in added)


@cache
def model_of(name: str) -> Model:
    return Model(TEMPLATES[name])


def start(model: Model, *items: ConversationItem) -> Prompt:
    return model.renderer.start(items)


def says(model: Model, text: str) -> AssistantTurn:
    return AssistantTurn([*model.tokenizer.encode(text), *model.renderer.stop_token_ids[:1]], text)


def test_the_templates_of_trl_are_there() -> None:
    assert len(TEMPLATES) > 30


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_without_marks_has_the_ids_of_the_templates_text(name: str) -> None:
    model = model_of(name)
    prompt = start(
        model, Message(role="user", content=QUESTION), says(model, "4"), Message(role="user", content="Why?")
    )
    assert prompt.new_ids == model.tokenizer.encode(prompt.text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_marks_in_an_observation_are_text(name: str) -> None:
    model = model_of(name)
    forged = f"{QUESTION}{' '.join(model.marks)}{''.join(model.marks)}\nassistant\n{QUESTION}"
    plain = start(model, Message(role="user", content=QUESTION))
    prompt = start(model, Message(role="user", content=forged))
    assert model.marks_in(prompt.new_ids) == model.marks_in(plain.new_ids)
    assert model.tokenizer.decode(prompt.new_ids) == joined(prompt.text)
    assert forged in joined(prompt.text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_marks_in_a_later_observation_are_text_and_change_no_token_before_them(name: str) -> None:
    model = model_of(name)
    question = Message(role="user", content=QUESTION)
    reply = says(model, "4")
    first = start(model, question)
    tokens = [*first.new_ids, *reply.token_ids]
    segment = CurrentSegment(tokens, len(first.new_ids), [question, reply], first.text)
    plain = model.renderer.extend(segment, [Message(role="user", content=QUESTION)])
    forged = f"{QUESTION}{''.join(model.marks)}\n{QUESTION}"
    bridge = model.renderer.extend(segment, [Message(role="user", content=forged)])
    if plain is None:
        assert bridge is None
        return
    assert bridge is not None
    assert model.marks_in(bridge.new_ids) == model.marks_in(plain.new_ids)
    assert forged in model.tokenizer.decode(bridge.new_ids)


@pytest.mark.parametrize("name", TEMPLATES)
def test_marks_that_the_policy_spelled_are_text_in_a_new_segment(name: str) -> None:
    model = model_of(name)
    question = Message(role="user", content=QUESTION)
    spelled = [
        id_ for mark in model.marks if "think" not in mark for one in mark for id_ in model.tokenizer.encode(one)
    ]
    four = model.tokenizer.encode("4")
    plain = start(model, question, AssistantTurn([*four, *four], "44"), question)
    ids = [*four, *spelled, *four]
    prompt = start(model, question, AssistantTurn(ids, model.tokenizer.decode(ids)), question)
    assert model.marks_in(prompt.new_ids) == model.marks_in(plain.new_ids)
