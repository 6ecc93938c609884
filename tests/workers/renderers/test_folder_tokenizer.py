"""Tokenizers of model folders, and the failures of those that cannot be loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import InfrastructureFailure, InvalidRunSpec
from headrace.runspec import PolicySpec, RunSpec, parse_run_spec
from headrace_workers.episode import make_plan
from headrace_workers.renderers import make_renderer
from headrace_workers.renderers.folder_tokenizer import FILES, load_tokenizer
from tests.workers.models import CHATML, make_model


def failure(tokenizer: Path | str, renderer: str = "template", **sampling: Any) -> InfrastructureFailure:
    with pytest.raises(InfrastructureFailure) as caught:
        make_plan(RunSpec(name="r", policy=PolicySpec(renderer=renderer, tokenizer=str(tokenizer)), sampling=sampling))
    return caught.value


def test_a_tokenizer_that_cannot_be_loaded_is_a_failure_with_a_hint(tmp_path: Path) -> None:
    assert failure(tmp_path / "none").kind == "tokenizer-missing"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert failure(empty).kind == "tokenizer-missing"
    assert failure(make_model(tmp_path / "bare", None)).kind == "no-chat-template"
    assert failure(make_model(tmp_path / "broken", "{% if %}")).kind == "template-unreadable"
    assert failure(make_model(tmp_path / "m"), "runes").kind == "unknown-renderer"
    assert failure(make_model(tmp_path / "m"), "llama-3").kind == "renderer-does-not-fit"
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    assert failure(tmp_path / "m").kind == "tokenizer-unreadable"


def test_a_tokenizer_without_an_end_of_turn_token_needs_a_stop_string(tmp_path: Path) -> None:
    plain = make_model(tmp_path, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", eos=None)
    assert failure(plain).kind == "no-stop-token"
    policy = PolicySpec(renderer="template", tokenizer=str(plain))
    assert make_plan(RunSpec(name="r", policy=policy, sampling={"stop": ["\n"]})).spec.sampling.stop == ["\n"]


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tokenizers", None)
    error = failure(make_model(tmp_path))
    assert (error.kind, error.retryable) == ("missing-extra", False)
    assert "pip install 'headrace[renderers]'" in str(error)


def test_a_name_is_fetched_from_the_hub_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "org/gone":
            raise ConnectionError("no route")
        return str(make_model(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert load_tokenizer("org/model").name_or_path == "org/model"
    assert asked == [("org/model", list(FILES))]
    error = failure("org/gone")
    assert (error.kind, error.retryable) == ("tokenizer-unreachable", True)


def test_a_spec_whose_renderer_lacks_a_tokenizer_is_refused_when_it_is_made() -> None:
    with pytest.raises(InvalidRunSpec, match="needs a tokenizer"):
        parse_run_spec({"name": "r", "policy": {"renderer": "template"}})
    with pytest.raises(InvalidRunSpec, match="has no tokenizer"):
        parse_run_spec({"name": "r", "policy": {"tokenizer": "org/model"}})


def test_the_vocabulary_is_as_large_as_the_models_own(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    size = load_tokenizer(str(folder)).vocab_size
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": size + 100}}))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.vocab_size == size + 100
    assert tokenizer.decode([size + 1]) == ""


def test_every_end_of_turn_id_in_the_models_files_is_a_stop_token(tmp_path: Path) -> None:
    folder = make_model(tmp_path, CHATML)
    end, other, start = (
        load_tokenizer(str(folder)).convert_tokens_to_ids(mark)
        for mark in ("<|im_end|>", "<|endoftext|>", "<|im_start|>")
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [other, start]}))
    renderer = make_renderer(PolicySpec(renderer="template", tokenizer=str(folder)))
    assert renderer.stop_token_ids == (end, other, start)


def test_truncation_and_padding_in_the_file_are_disabled(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    definition = json.loads((folder / "tokenizer.json").read_text())
    whole = load_tokenizer(str(folder)).encode("quick brown fox")
    definition["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    assert load_tokenizer(str(folder)).encode("quick brown fox") == whole
