"""Renderers of model families over a small vocabulary that has the special tokens they ask for."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Tokenizer

from headrace.errors import InfrastructureFailure
from headrace_workers.renderers.family_renderer import FamilyRenderer, families
from headrace_workers.renderers.folder_tokenizer import FolderTokenizer, load_tokenizer
from tests.workers.models import make_model

MISSING_TOKEN = re.compile(r"'([^' ]+)' not found|token for '([^']+)'|one token for '([^']+)'")
"""The token that a family misses, in its error."""

NEED_THE_HUB = {"gpt-oss"}
"""Families that fetch their vocabulary."""


@cache
def family_renderers() -> tuple[FolderTokenizer, dict[str, FamilyRenderer]]:
    """Make the renderers of all families that need no file from the hub, with their tokenizer."""
    names = [name for name in families() if name not in NEED_THE_HUB]
    marks: set[str] = _marks_of_the_package()
    for _ in range(30):
        tokenizer = _tokenizer(marks)
        made: dict[str, FamilyRenderer] = {}
        missing: set[str] = set()
        for name in names:
            try:
                made[name] = FamilyRenderer(name, tokenizer)
            except InfrastructureFailure as error:
                missing |= {mark for groups in MISSING_TOKEN.findall(error.detail) for mark in groups if mark}
        if not missing:
            break
        marks |= missing
    assert made.keys() == set(names)
    return tokenizer, made


def call_text(renderer: FamilyRenderer, tokenizer: FolderTokenizer, name: str, arguments: dict[str, Any]) -> str:
    """The text of a call as the family writes it."""
    call = {"type": "function", "id": "call_0", "function": {"name": name, "arguments": arguments}}
    user = {"role": "user", "content": "u"}
    tools = [{"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}]
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    before = renderer._render([user], tools, generation_prompt=True)
    ids = renderer._render([user, reply], tools, generation_prompt=False)
    return tokenizer.decode(ids[len(before) :] if ids[: len(before)] == before else ids)


def _marks_of_the_package() -> set[str]:
    import renderers

    folder = Path(renderers.__file__).parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    return set(re.findall(r"""["'](<[^"'\s\\{}]{1,40}>|\[[A-Za-z_]+\])["']""", text))


def _tokenizer(marks: set[str]) -> FolderTokenizer:
    with TemporaryDirectory() as name:
        folder = make_model(Path(name))
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in sorted(marks)])
        (folder / "tokenizer.json").write_text(backend.to_str())
        return load_tokenizer(name)
