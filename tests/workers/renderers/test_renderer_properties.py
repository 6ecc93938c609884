"""Property tests of all renderers: each prompt extends the current segment or starts a new one, also with difficult
chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.runspec import RunSpec
from headrace.trajectory import Message, Sampling
from headrace_workers.episode.run_plan import make_plan
from headrace_workers.episode.segment_builder import AgentTrack, NextPrompt, TurnRecord
from headrace_workers.policies import Sample, one_version
from headrace_workers.renderers import BytesRenderer, Renderer
from headrace_workers.renderers.control_tokens import joined
from headrace_workers.renderers.family_renderer import FamilyRenderer
from headrace_workers.renderers.folder_tokenizer import FolderTokenizer, load_tokenizer
from headrace_workers.renderers.template_renderer import TemplateRenderer
from tests.workers.fakes import FIRST
from tests.workers.models import CHATML, STRIPS_THINKING, make_model

ASK = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"

AWKWARD = {
    "shows everything as it was": CHATML,
    "strips thinking of earlier turns": STRIPS_THINKING,
    "shows the minute": "{{ strftime_now('%d %b %Y %H:%M') }}\n" + CHATML,
    "merges users that follow each other": """{%- for m in messages %}
{%- if m.role == 'user' and loop.previtem is defined and loop.previtem.role == 'user' %}{{ '\n\n' + m.content }}
{%- else %}{{ ('<|im_end|>\n' if loop.index0 else '') + '<|im_start|>' + m.role + '\n' + m.content }}{%- endif %}
{%- endfor %}{{ '<|im_end|>\n' }}"""
    + ASK,
    "has no role for the system": """{%- for m in messages %}{%- if m.role == 'system' %}
{{- raise_exception('System role not supported') }}{%- endif %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{%- endfor %}"""
    + ASK,
    "ends each turn with several newlines": """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n\n\n' }}{%- endfor %}"""
    + ASK,
    "puts tools into the first message of the system": """{%- set first = messages[0] %}
{{- '<|im_start|>system\n' + (first.content if first.role == 'system' else '') }}
{{- tools | tojson if tools else 'no tools' }}{{ '<|im_end|>\n' }}
{%- for m in messages %}{%- if not (loop.first and m.role == 'system') %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"""
    + ASK,
    "has no generation prompt": """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}""",
    "shouts": """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content | upper + '<|im_end|>\n' }}{%- endfor %}"""
    + ASK,
    "numbers turns from the last one back": """{%- for m in messages %}
{{- '<|im_start|>' + m.role + ' ' + loop.revindex | string + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"""
    + ASK,
    "trims": """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}{%- endfor %}"""
    + ASK,
    "is plain text": """{%- for m in messages %}{{ m.role | title + ': ' + m.content + '\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant: ' }}{%- endif %}""",
}

NEVER_EXTENDS = {
    "has no generation prompt",
    "shows the minute",
    "numbers turns from the last one back",
    "is plain text",  # it never shows the end-of-turn token
}
"""Templates for which every finished turn is a separate segment; the others extend at least if nothing is rewritten."""

FAMILIES = ("qwen3", "qwen3 that keeps thinking")

TOOLS = [{"type": "function", "function": {"name": "añadir", "parameters": {"type": "object"}}}]

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12)
SAYS = st.lists(
    st.one_of(
        TEXT,
        st.sampled_from(
            [
                "<think>\nhm\n</think>\n\n",
                "<think>",
                "</think>",
                '<tool_call>\n{"name": "añadir", "arguments": {"a": 1}}\n</tool_call>',
                "<tool_call>{oops",
                " trailing \n",
                "<|im_end|>\n<|im_start|>user\n",
            ]
        ),
    ),
    max_size=4,
).map("".join)
NEW = st.lists(st.builds(Message, role=st.sampled_from(["user", "tool"]), content=TEXT | SAYS), min_size=1, max_size=2)
FIRST_MESSAGES = st.tuples(st.booleans(), NEW)


@st.composite
def _sampled(draw: st.DrawFn, encode: Callable[[str], list[int]], vocab_size: int, stops: list[int]) -> list[int]:
    """Ids that a policy can sample: text that ends properly or is cut off (even in a character), or any ids."""
    kind = draw(st.sampled_from(["whole", "cut", "any"]))
    if kind == "any":
        return draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=8))
    ids = encode(draw(SAYS))
    if kind == "cut" or not stops:
        ids = ids[: draw(st.integers(0, len(ids)))]
        return ids or [draw(st.integers(0, vocab_size - 1))]
    return [*ids, draw(st.sampled_from(stops))]


class Case:
    """A renderer under test, its tokenizer if it has one, and ``encode`` for text."""

    def __init__(self, renderer: Renderer, tokenizer: FolderTokenizer | None = None) -> None:
        self.renderer = renderer
        self.tokenizer = tokenizer
        self.encode: Callable[[str], list[int]] = tokenizer.encode if tokenizer else lambda text: list(text.encode())


@cache
def case_of(name: str) -> Case:
    if name == "bytes":
        return Case(BytesRenderer())
    with TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(str(make_model(Path(folder), AWKWARD.get(name, CHATML))))
    if name in FAMILIES:
        options = {"thinking_retention": "all"} if "keeps" in name else {}
        return Case(FamilyRenderer("qwen3", tokenizer, options), tokenizer)
    minutes = count()
    clock = lambda: datetime(2026, 1, 1) + timedelta(minutes=next(minutes))  # noqa: E731
    return Case(TemplateRenderer(tokenizer, now=clock), tokenizer)


def answer(track: AgentTrack, asked: NextPrompt, renderer: Renderer, ids: list[int], index: int) -> None:
    sample = Sample(
        token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason="stop", versions=one_version(len(ids), FIRST)
    )
    turn = TurnRecord(
        index=index,
        reward=0.0,
        reward_parts={},
        finish_reason="stop",
        said="",
        tool_calls=[],
        policy_s=0.0,
        environment_s=0.0,
    )
    track.commit(asked, sample, renderer.parse(ids), turn)


def new_track(renderer: Renderer, tools: list[dict[str, Any]]) -> AgentTrack:
    plan = make_plan(RunSpec(name="r")).default_agent
    return AgentTrack("agent", plan, Sampling(), renderer, tools)


@pytest.mark.parametrize("name", ["bytes", *FAMILIES, *AWKWARD])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_each_prompt_extends_the_current_segment_or_starts_a_new_one(name: str, data: st.DataObject) -> None:
    case = case_of(name)
    renderer, vocab_size = case.renderer, case.renderer.tokenizer.vocab_size
    has_system, messages = data.draw(FIRST_MESSAGES)
    if has_system and "no role for the system" not in name:
        messages = [Message(role="system", content=data.draw(TEXT)), *messages]
    track = new_track(renderer, data.draw(st.sampled_from([[], TOOLS])))
    stands: list[int] = []
    sampled: list[list[int]] = []
    prompts: list[list[int]] = []
    for index in range(data.draw(st.integers(1, 4))):
        for message in messages:
            track.observe(message)
        asked = track.prompt()
        prompt = asked.token_ids
        if asked.segment_ids:
            assert prompt[: len(stands)] == stands
            assert len(prompt) > len(stands)
        ids = data.draw(_sampled(case.encode, vocab_size, list(renderer.stop_token_ids)))
        answer(track, asked, renderer, ids, index)
        stands = prompt + ids
        prompts.append(prompt)
        sampled.append(ids)
        messages = data.draw(NEW)
    seen = []
    for segment in track.segments():
        tokens = segment.token_ids.tolist()
        for turn in segment.turns:
            assert tokens[: turn.start] == prompts[turn.index]
            assert tokens[turn.start : turn.end] == sampled[turn.index]
            seen.append(turn.index)
    assert seen == list(range(len(prompts)))


@pytest.mark.parametrize("name", AWKWARD)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_an_extended_prompt_is_the_templates_own_text_of_the_conversation(name: str, data: st.DataObject) -> None:
    """The prompt's tokens decode exactly to the template's text; otherwise our prompt would differ from that of the
    engine's own chat route."""
    case = case_of(name)
    renderer, tokenizer = case.renderer, case.tokenizer
    assert tokenizer is not None
    track = new_track(renderer, [])
    stops = list(renderer.stop_token_ids)[:1]
    for index in range(3):
        track.observe(Message(role="user", content=data.draw(TEXT)))
        asked = track.prompt()
        assert tokenizer.decode(asked.token_ids) == joined(asked.prompt.text)
        said = data.draw(SAYS)
        answer(track, asked, renderer, [*tokenizer.encode(said or "x"), *stops], index)


@pytest.mark.parametrize("name", AWKWARD)
def test_a_template_that_keeps_a_plain_answer_unchanged_keeps_one_segment(name: str) -> None:
    case = case_of(name)
    track = new_track(case.renderer, [])
    for index in range(3):
        track.observe(Message(role="user", content=f"question {index}"))
        answer(track, track.prompt(), case.renderer, [*case.encode("42"), *case.renderer.stop_token_ids[:1]], index)
    assert len(track.segments()) == (3 if name in NEVER_EXTENDS else 1)


def test_the_bytes_renderer_has_the_tools_as_json() -> None:
    text = bytes(id_ for id_ in BytesRenderer().start([], TOOLS).new_ids if id_ < 256)
    assert json.loads(text) == TOOLS
