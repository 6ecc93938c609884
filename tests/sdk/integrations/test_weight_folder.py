"""Folders of weights, with a stand-in for safetensors; the real one is in tests/vllm."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.errors import InvalidRequest, MissingExtra
from headrace.integrations import weight_folder
from headrace.integrations.weight_folder import WeightFolder


class Tensor:
    """As much of a tensor as is needed to save it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def detach(self) -> Tensor:
        return self

    cpu = contiguous = detach

    def numel(self) -> int:
        return len(self.text)

    def element_size(self) -> int:
        return 1


def tensors(**texts: str) -> Any:
    return [(name, Tensor(text)) for name, text in texts.items()]


@pytest.fixture(autouse=True)
def safetensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def save_file(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_text(json.dumps({name: tensor.text for name, tensor in tensors.items()}))

    fake: Any = ModuleType("safetensors.torch")
    fake.save_file = save_file
    monkeypatch.setitem(sys.modules, "safetensors", ModuleType("safetensors"))
    monkeypatch.setitem(sys.modules, "safetensors.torch", fake)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", "pytorch_model.bin"):
        (folder / name).write_text(f"the {name} of the model")
    return folder


def test_a_step_has_its_weights_and_what_the_model_has_beside_weights(model: Path, tmp_path: Path) -> None:
    made = WeightFolder(model, tmp_path / "steps").write(tensors(a="1", b="2"))
    assert sorted(path.name for path in made.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((made / "model.safetensors").read_text()) == {"a": "1", "b": "2"}
    assert (made / "tokenizer.json").read_text() == "the tokenizer.json of the model"


def test_weights_of_more_than_a_file_have_an_index(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_folder, "SHARD_BYTES", 3)
    made = WeightFolder(model, tmp_path / "steps").write(tensors(a="11", b="22", c="3"))
    index = json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {
        "a": "model-00001.safetensors",
        "b": "model-00001.safetensors",
        "c": "model-00002.safetensors",
    }
    assert json.loads((made / index["c"]).read_text()) == {"c": "3"}


def test_a_folder_is_there_whole_or_not_at_all(model: Path, tmp_path: Path) -> None:
    def dying() -> Iterator[tuple[str, Any]]:
        yield from tensors(a="1")
        raise RuntimeError("out of memory")

    folder = WeightFolder(model, tmp_path / "steps")
    first = folder.write(tensors(a="0"))
    with pytest.raises(RuntimeError, match="out of memory"):
        folder.write(dying())
    assert list((tmp_path / "steps").glob("step-*")) == [first]
    assert folder.newest == first
    assert folder.write(tensors(a="2")).name == "step-000002"
    assert not list((tmp_path / "steps").glob(".*"))


def test_the_newest_folders_stay(model: Path, tmp_path: Path) -> None:
    folder = WeightFolder(model, tmp_path / "steps", keep=2)
    made = [folder.write(tensors(a=str(k))) for k in range(4)]
    assert [path.exists() for path in made] == [False, False, True, True]
    assert folder.newest == made[-1]


def test_a_learner_that_was_started_again_counts_on(model: Path, tmp_path: Path) -> None:
    assert WeightFolder(model, tmp_path / "steps").write(tensors(a="1")).name == "step-000001"
    assert WeightFolder(model, tmp_path / "steps").write(tensors(a="2")).name == "step-000002"


def test_a_name_on_the_hub_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"holds no config\.json"):
        WeightFolder("Qwen/Qwen3-0.6B", tmp_path)


def test_no_weights_are_an_error_and_not_an_empty_model(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no weights"):
        WeightFolder(model, tmp_path / "steps").write([])


def test_without_safetensors_it_says_what_to_install(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(MissingExtra, match="pip install safetensors"):
        WeightFolder(model, tmp_path / "steps").write(tensors(a="1"))
