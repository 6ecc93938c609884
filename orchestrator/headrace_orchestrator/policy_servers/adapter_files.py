"""Checks of the files of a LoRA adapter, before a server is asked to load it.

* A folder that does not exist on this machine is left to the server.
* A folder that is not an adapter as PEFT writes it, or is truncated, is refused with the reason.
* Versions of one trained adapter have one base.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG = "adapter_config.json"
BASE = "base_model_name_or_path"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def problem_of(folder: str, before: str = "") -> str:
    """The fault of an adapter; empty if none is found. ``before``: the folder of the version before it."""
    path = Path(folder)
    if not path.exists():
        return ""
    try:
        config = _config(path)
        if not any((path / name).exists() for name in WEIGHTS):
            raise ValueError(f"{folder} has no {WEIGHTS[0]}")
        earlier = _config(Path(before)) if before and Path(before).exists() else {}
    except (OSError, ValueError) as error:
        return f"{error}: write it as PEFT does, and name it once it is complete"
    base, base_before = config.get(BASE), earlier.get(BASE)
    if base and base_before and base != base_before:
        return f"{folder} was made for base {base!r}, the version before it for {base_before!r}"
    return ""


def _config(path: Path) -> dict[str, Any]:
    if not (path / CONFIG).is_file():
        raise ValueError(f"{path} has no {CONFIG}")
    try:
        found = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path / CONFIG} cannot be read ({error})") from error
    if not isinstance(found, dict) or found.get("peft_type") != "LORA":
        raise ValueError(f"{path / CONFIG} is not the configuration of a LoRA adapter")
    rank = found.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{path / CONFIG} has rank r = {rank!r}")
    return found
