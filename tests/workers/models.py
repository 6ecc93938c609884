"""Model folders without weights, made in place: a small byte-level BPE tokenizer and a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is two plus two? Four, said the user to the assistant.",
    "assistant user system tool think </think> <a>7</a> tool_call name arguments {} [] \n\n Turn Observation",
    "Grüße aus Köln, naïve café, 東京 日本語 🙂🙃 mañana",
]

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
"""Special tokens; the rest are added tokens that stay visible in text, as in Qwen's vocabulary."""

VISIBLE = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

CHATML = """{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Shows everything as it was said."""

STRIPS_THINKING = """{%- for m in messages %}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content %}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
"""Begins each answer with thinking, and shows no thinking of earlier turns."""


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in VISIBLE])
    return tokenizer.to_str()


def _with_marks(marks: Sequence[str]) -> str:
    tokenizer = Tokenizer.from_str(_trained())
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks if mark.startswith("<|")])
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks if not mark.startswith("<|")])
    return tokenizer.to_str()


def make_model(
    folder: Path,
    template: str | None = CHATML,
    *,
    eos: str | None = "<|im_end|>",
    marks: Sequence[str] = (),
    **config: Any,
) -> Path:
    """Write a folder with a tokenizer and this template; ``config`` is its tokenizer_config.json. ``marks``: added
    tokens besides those of Qwen; those that begin with ``<|`` are special."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_with_marks(marks) if marks else _trained())
    named = {"eos_token": eos} if eos is not None else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
