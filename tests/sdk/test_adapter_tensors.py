"""Tensors of an adapter that fit a model, and each way in which they do not."""

from __future__ import annotations

import pytest

from headrace.adapter_tensors import MAX_LISTED, PREFIX, module_of, require_adapter_fits
from headrace.weight_files import TensorType, WeightFilesError

SHAPES = {f"model.layers.{layer}.self_attn.{name}": (6, 8) for layer in range(4) for name in ("q_proj", "v_proj")}
SHAPES["model.embed_tokens"] = (20, 8)

Tensors = dict[str, TensorType]


def adapter(modules: list[str], rank: int = 2) -> Tensors:
    tensors = {}
    for module in modules:
        out, into = SHAPES[module]
        tensors[f"{PREFIX}{module}.lora_A.weight"] = TensorType("F32", [rank, into])
        tensors[f"{PREFIX}{module}.lora_B.weight"] = TensorType("F32", [out, rank])
    return tensors


WHOLE = adapter([name for name in SHAPES if "layers" in name])


def problem(tensors: Tensors) -> str:
    with pytest.raises(WeightFilesError) as caught:
        require_adapter_fits("/a", tensors, lambda name: module_of(name) in SHAPES, SHAPES)
    assert caught.value.kind == "adapter-does-not-fit"
    return str(caught.value)


def fits(tensors: Tensors) -> None:
    require_adapter_fits("/a", tensors, lambda name: module_of(name) in SHAPES, SHAPES)


def test_an_adapter_of_all_or_of_some_modules_fits() -> None:
    fits(WHOLE)
    fits(adapter(["model.layers.2.self_attn.q_proj"]))
    fits({name.removeprefix(PREFIX): tensor for name, tensor in WHOLE.items()})


@pytest.mark.parametrize("layers", ["layers", "layers.1", "layers.3"])
def test_names_with_one_component_too_many_are_listed(layers: str) -> None:
    moved = {name.replace(f"model.{layers}", f"model.model.{layers}"): kind for name, kind in WHOLE.items()}
    text = problem(moved)
    unknown = [name for name in moved if name not in WHOLE]
    assert all(name in text for name in unknown[:MAX_LISTED])
    more = len(unknown) - MAX_LISTED
    assert (f"and {more} more" in text) == (more > 0)


def test_a_matrix_without_its_partner_is_named() -> None:
    half = {name: kind for name, kind in WHOLE.items() if "layers.0.self_attn.q_proj.lora_B" not in name}
    assert "model.layers.0.self_attn.q_proj.lora_B is missing" in problem(half)


@pytest.mark.parametrize(
    ("matrix", "shape", "text"),
    [
        ("A", [2, 7], "are for a weight of shape [6, 7], in the model [6, 8]"),
        ("B", [5, 2], "are for a weight of shape [5, 8], in the model [6, 8]"),
        ("A", [3, 8], "has rank 3"),
        ("A", [8], "has shape [8], not two dimensions"),
    ],
)
def test_a_shape_that_does_not_fit_is_named(matrix: str, shape: list[int], text: str) -> None:
    name = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_{matrix}.weight"
    assert text in problem(WHOLE | {name: TensorType("F32", shape)})


def test_the_matrices_of_an_embedding_have_the_opposite_orientation() -> None:
    stem = f"{PREFIX}model.embed_tokens.lora_embedding_"
    right = {f"{stem}A": TensorType("F32", [2, 20]), f"{stem}B": TensorType("F32", [8, 2])}
    fits(right)
    assert "shape [8, 19], in the model [8, 20]" in problem(right | {f"{stem}A": TensorType("F32", [2, 19])})


def test_an_adapter_without_tensors_fits_nothing() -> None:
    assert "it has no tensors" in problem({})


def test_a_module_of_unknown_shape_is_not_compared() -> None:
    require_adapter_fits("/a", WHOLE, lambda name: True, {})
