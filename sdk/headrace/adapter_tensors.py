"""The comparison of a LoRA adapter's tensors with the modules of a model.

* Every tensor must belong to a module that takes an adapter; an engine would ignore others without an error.
* Every module has both matrices, of one rank, in the shape of its weight. Values do not matter: all may be zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from headrace.weight_files import TensorType, WeightFilesError

PREFIX = "base_model.model."
"""Prefix of all tensor names in PEFT's layout."""

MAX_LISTED = 8
"""Number of problems that a message lists."""

_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<matrix>[AB])(?:\.weight)?")

Shape = Sequence[int]


def require_adapter_fits(
    folder: str,
    tensors: Mapping[str, TensorType],
    known: Callable[[str], bool],
    shapes: Mapping[str, Shape],
) -> None:
    """Raise WeightFilesError ``adapter-does-not-fit`` with all that does not fit.

    ``known(name)`` returns True if the module of a tensor takes an adapter; ``shapes`` are those of the model's
    weights, by module.
    """
    problems = list(_problems(tensors, known, shapes)) or ([] if tensors else ["it has no tensors"])
    if problems:
        raise WeightFilesError("adapter-does-not-fit", f"{folder}: {listed(problems)}")


def listed(problems: Sequence[str]) -> str:
    """The first problems, and the number of the others."""
    more = len(problems) - MAX_LISTED
    return "; ".join(problems[:MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")


def module_of(name: str) -> str:
    """The module of a LoRA tensor in PEFT's layout; empty for other tensors."""
    found = _LORA.fullmatch(name.removeprefix(PREFIX))
    return found["module"] if found is not None else ""


def _problems(
    tensors: Mapping[str, TensorType], known: Callable[[str], bool], shapes: Mapping[str, Shape]
) -> Iterator[str]:
    pairs: dict[str, dict[str, Shape]] = {}
    for name, tensor in tensors.items():
        found = _LORA.fullmatch(name.removeprefix(PREFIX))
        if not known(name):
            yield f"{name} belongs to no module of the model that takes an adapter"
        elif found is not None and len(tensor.shape) != 2:
            yield f"{name} has shape {list(tensor.shape)}, not two dimensions"
        elif found is not None:
            key = f"{found['module']}.lora_{found['embedding'] or ''}"
            pairs.setdefault(key, {})[found["matrix"]] = tensor.shape
    for key, pair in pairs.items():
        yield from _pair_problems(key, pair, shapes.get(key.rpartition(".lora_")[0]))


def _pair_problems(key: str, pair: Mapping[str, Shape], weight: Shape | None) -> Iterator[str]:
    if pair.keys() != {"A", "B"}:
        yield f"{key}{'B' if 'A' in pair else 'A'} is missing"
        return
    (rank, into), (out, rank_of_b) = pair["A"], pair["B"]
    if rank != rank_of_b:
        yield f"{key}A has rank {rank}, {key}B rank {rank_of_b}"
    if weight is None or len(weight) != 2:
        return
    expected = tuple(weight) if not key.endswith("embedding_") else (weight[1], weight[0])
    if (out, into) != expected:
        yield f"{key}A and {key}B are for a weight of shape {[out, into]}, in the model {list(expected)}"
