"""Checks of a LoRA adapter's files before a server loads them.

* A folder that does not exist on this machine is not checked: the server may see it.
* A folder that is not an adapter as PEFT writes it, or is incomplete, is refused with the reason.
* All versions of a trained adapter have the same base.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG = "adapter_config.json"
BASE = "base_model_name_or_path"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def adapter_problem(folder: str, previous: str = "") -> str:
    """The problem with an adapter's files; empty if none. ``previous``: the folder of the previous version."""
    path = Path(folder)
    if not path.exists():
        return ""
    try:
        config = _config(path)
        if not any((path / name).exists() for name in WEIGHTS):
            raise ValueError(f"{folder} has no {WEIGHTS[0]}")
        previous_config = _config(Path(previous)) if previous and Path(previous).exists() else {}
    except (OSError, ValueError) as error:
        return f"{error}: write it as PEFT does, and announce it once it is complete"
    base, previous_base = config.get(BASE), previous_config.get(BASE)
    if base and previous_base and base != previous_base:
        return f"{folder} was made for base {base!r}, the previous version for {previous_base!r}"
    return ""


def _config(path: Path) -> dict[str, Any]:
    if not (path / CONFIG).is_file():
        raise ValueError(f"{path} has no {CONFIG}")
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path / CONFIG} cannot be read ({error})") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"{path / CONFIG} is not the configuration of a LoRA adapter")
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{path / CONFIG} has rank r = {rank!r}")
    return config
