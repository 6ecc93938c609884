"""LoRA adapters of the tiny policy: each is another weight vector with its own name, loaded as in vLLM.

* A folder is refused, and changes nothing, unless it has PEFT's layout and contains a weight vector.
* A name that is in use is not replaced; running requests keep the adapter with which they started.
"""

from __future__ import annotations

import json
from pathlib import Path

from headrace.errors import InvalidRequest, NotFound
from headrace.wire.policy_server import AdapterRequest
from headrace_workers.tiny_policy.model import Floats
from headrace_workers.tiny_policy.policy import TinyPolicy
from headrace_workers.tiny_policy.weight_updates import read_folder, write_folder

CONFIG = "adapter_config.json"
FILE = "adapter_model.safetensors"
MAX_RANK = 8
"""The limit that vLLM calls ``--max-lora-rank``."""


def write_adapter(folder: Path, weights: Floats, *, rank: int = 4, base: str = "policy") -> None:
    """Write weights f64[SIZE] as an adapter folder that the tiny policy loads."""
    write_folder(folder, weights, FILE)
    config = {"peft_type": "LORA", "r": rank, "base_model_name_or_path": base}
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")


class TinyPolicyAdapters:
    """The adapters of one server; its own policy has the name ``model``."""

    def __init__(self, model: str, policy: TinyPolicy) -> None:
        self._model = model
        self._policy = policy
        self._loaded: dict[str, tuple[str, TinyPolicy]] = {}

    def policy(self, model: str) -> TinyPolicy:
        """The policy of that name. Raises NotFound."""
        if model in ("", self._model):
            return self._policy
        if model not in self._loaded:
            raise NotFound(f"The model `{model}` does not exist.")
        return self._loaded[model][1]

    def cards(self) -> list[dict[str, object]]:
        """The adapters as entries of the list of models."""
        return [
            {"id": name, "object": "model", "root": root, "parent": self._model, "max_model_len": None}
            for name, (root, _) in self._loaded.items()
        ]

    def load(self, request: AdapterRequest) -> str:
        """Load a folder under a name. Raises InvalidRequest, or NotFound for a missing folder."""
        name = request.lora_name
        if name in self._loaded:
            raise InvalidRequest(f"The lora adapter '{name}' has already been loaded.")
        if not (Path(request.lora_path) / CONFIG).exists():
            raise NotFound(f"Loading lora {name} failed: No adapter found for {request.lora_path}")
        rank = json.loads((Path(request.lora_path) / CONFIG).read_bytes())["r"]
        if rank > MAX_RANK:
            raise InvalidRequest(f"LoRA rank {rank} is greater than max_lora_rank {MAX_RANK}.")
        self._loaded[name] = request.lora_path, TinyPolicy(weights=read_folder(request.lora_path, FILE))
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, request: AdapterRequest) -> str:
        """Remove an adapter. Raises NotFound."""
        if self._loaded.pop(request.lora_name, None) is None:
            raise NotFound(f"The lora adapter '{request.lora_name}' cannot be found.")
        return f"Success: LoRA adapter '{request.lora_name}' removed successfully."
