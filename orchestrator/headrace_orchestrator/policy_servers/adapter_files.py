"""Checks of a LoRA adapter's files before a server loads them.

* A folder that does not exist on this machine is not checked: the server may see it.
* A folder that is not an adapter as PEFT writes it, or is incomplete, is refused with the reason.
* All versions of a trained adapter have the same base.
* Where the base's folder exists here too, tensors that fit nothing in it are found, for servers that cannot check them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.adapter_tensors import module_of, require_adapter_fits
from headrace.weight_files import ADAPTER_CONFIG, WeightFilesError, read_header, require_digest, weight_paths
from headrace_orchestrator.policy_servers.server_state import CallProblem

BASE = "base_model_name_or_path"
FLOATS = {"F64", "F32", "F16", "BF16"}
"""Types of weights whose shape is the module's; a quantized weight has another."""

REMEDY = "write it as PEFT does, and announce it once it is complete"


def adapter_problem(folder: str, previous: str = "") -> CallProblem | None:
    """The problem with an adapter's files, if any. ``previous``: the folder of the previous version."""
    path = Path(folder)
    if not path.exists():
        return None
    try:
        config = _config(path)
        weights = weight_paths(path, "adapter")[-1]
        if weights.suffix == ".safetensors":
            read_header(weights)
        previous_config = _config(Path(previous)) if previous and Path(previous).exists() else {}
    except WeightFilesError as error:
        return CallProblem(error.kind, f"{error}: {REMEDY}", untouched=True)
    except (OSError, ValueError) as error:
        return CallProblem("weights-damaged", f"{error}: {REMEDY}", untouched=True)
    base, previous_base = config.get(BASE), previous_config.get(BASE)
    if base and previous_base and base != previous_base:
        message = f"{folder} was made for base {base!r}, the previous version for {previous_base!r}"
        return CallProblem("adapter-does-not-fit", message, untouched=True)
    return None


def unchecked_problem(folder: str, digest: str) -> CallProblem | None:
    """The problem of an adapter's files that its server cannot check, as far as this machine can read them."""
    if digest and Path(folder).exists():
        try:
            require_digest(folder, "adapter", digest)
        except WeightFilesError as error:
            return CallProblem(error.kind, str(error), untouched=True)
    return base_problem(folder)


def base_problem(folder: str) -> CallProblem | None:
    """The tensors of an adapter that fit nothing in its base, if both folders exist on this machine."""
    path = Path(folder)
    try:
        base, weights = Path(str(_config(path).get(BASE))), weight_paths(path, "adapter")[-1]
        if not base.is_dir() or weights.suffix != ".safetensors" or _has_other_names(base):
            return None
        tensors = {name: kind for file in weight_paths(base, "full") for name, kind in read_header(file).items()}
        shapes = {name.removesuffix(".weight"): kind.shape for name, kind in tensors.items() if kind.type in FLOATS}
        modules = {name.rpartition(".")[0] for name in tensors}
        require_adapter_fits(folder, read_header(weights), lambda name: module_of(name) in modules, shapes)
    except WeightFilesError as error:
        return CallProblem(error.kind, str(error), untouched=True) if error.kind == "adapter-does-not-fit" else None
    except (OSError, ValueError):
        return None  # the files are checked before
    return None


def _has_other_names(base: Path) -> bool:
    """Return True if the tensors of a checkpoint may have other names than the modules that were trained."""
    return "vision_config" in json.loads((base / "config.json").read_text(encoding="utf-8"))


def _config(path: Path) -> dict[str, Any]:
    if not (path / ADAPTER_CONFIG).is_file():
        raise ValueError(f"{path} has no {ADAPTER_CONFIG}")
    try:
        config = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path / ADAPTER_CONFIG} cannot be read ({error})") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"{path / ADAPTER_CONFIG} is not the configuration of a LoRA adapter")
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{path / ADAPTER_CONFIG} has rank r = {rank!r}")
    return config
