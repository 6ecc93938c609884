"""Folders of weights, with a replacement for safetensors; tests/vllm uses the real one."""

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
    """The part of a tensor that saving it needs."""

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


def test_a_folder_holds_the_weights_and_the_other_files_of_the_models_folder(model: Path, tmp_path: Path) -> None:
    made = WeightFolder(model, tmp_path / "steps").write(tensors(a="1", b="2"))
    assert sorted(path.name for path in made.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((made / "model.safetensors").read_text()) == {"a": "1", "b": "2"}
    assert (made / "tokenizer.json").read_text() == "the tokenizer.json of the model"


def test_weights_in_several_files_have_an_index(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_folder, "SHARD_BYTES", 3)
    made = WeightFolder(model, tmp_path / "steps").write(tensors(a="11", b="22", c="3"))
    index = json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {
        "a": "model-00001.safetensors",
        "b": "model-00001.safetensors",
        "c": "model-00002.safetensors",
    }
    assert json.loads((made / index["c"]).read_text()) == {"c": "3"}


def test_a_folder_exists_completely_or_not_at_all(model: Path, tmp_path: Path) -> None:
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


def test_the_newest_folders_are_kept(model: Path, tmp_path: Path) -> None:
    folder = WeightFolder(model, tmp_path / "steps", keep=2)
    made = [folder.write(tensors(a=str(k))) for k in range(4)]
    assert [path.exists() for path in made] == [False, False, True, True]
    assert folder.newest == made[-1]


def test_a_restarted_learner_continues_the_count_of_steps(model: Path, tmp_path: Path) -> None:
    assert WeightFolder(model, tmp_path / "steps").write(tensors(a="1")).name == "step-000001"
    assert WeightFolder(model, tmp_path / "steps").write(tensors(a="2")).name == "step-000002"


def test_a_name_on_the_hub_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"has no config\.json"):
        WeightFolder("Qwen/Qwen3-0.6B", tmp_path)


def test_an_empty_list_of_weights_is_an_error(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="weights is empty"):
        WeightFolder(model, tmp_path / "steps").write([])


def test_without_safetensors_the_error_says_what_to_install(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(MissingExtra, match="pip install safetensors"):
        WeightFolder(model, tmp_path / "steps").write(tensors(a="1"))
