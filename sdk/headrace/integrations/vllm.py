"""What Headrace adds to the workers of a vLLM server, so that weights of a folder get in exactly or not at all.

    vllm serve MODEL --worker-extension-cls headrace.integrations.vllm.WorkerExtension    # and VLLM_SERVER_DEV_MODE=1

* `headrace_check` says whether a folder's safetensors files fit the model, and changes nothing. A folder that does not
  exist, is incomplete, is cut short, or holds other names or shapes is refused with the reason.
* `headrace_load` checks again, then loads in place. Tied embeddings follow, on CPUs too, where vLLM's own reload keeps
  the packed copy of the old ones.
* A load that fails half-way is no refusal: it leaves mixed weights, says so, and a later load can mend them.
* Running requests must be paused meanwhile, and caches cleared, by the caller: `POST /pause` does both.

Both are called with `POST /collective_rpc {"method": …, "args": [folder]}` and answer one dict for each worker:
`{"tensors": n, "bytes": n}`, `{"refused": "why"}` or `{"mixed": "why"}`. The module needs nothing but vLLM.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

HEAD = "lm_head.weight"


FLOATS = {"F64", "F32", "F16", "BF16"}
"""Types that may stand for one another: a learner may train in another precision than it serves."""


class CheckpointError(ValueError):
    """A folder that cannot be loaded; the message says why."""


class TensorType(NamedTuple):
    """Of a tensor, as safetensors writes it."""

    type: str
    shape: list[int]


class Checkpoint(ExitStack):
    """The open safetensors files of a folder: file and kind of each tensor by its name. Raises CheckpointError."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.files: dict[str, Any] = {}
        self.kinds: dict[str, TensorType] = {}
        self.size_bytes = 0
        try:
            self._open(Path(folder))
        except BaseException:
            self.close()
            raise

    def tensors(self) -> Iterator[tuple[str, Any]]:
        for name, file in self.files.items():
            yield name, file.get_tensor(name)

    def _open(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(
                f"{folder}: {'no *.safetensors in it' if folder.is_dir() else 'there is no such folder here'}"
            )
        for path in paths:
            try:
                file = self.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} is no whole safetensors file, or is still being written: {error}"
                ) from None
            self.size_bytes += os.stat(path).st_size
            for name in file.keys():  # noqa: SIM118  (no dict)
                if name in self.files:
                    raise CheckpointError(f"{path}: {name} is in another file of the folder, too")
                self.files[name] = file
                entry = file.get_slice(name)
                self.kinds[name] = TensorType(entry.get_dtype(), entry.get_shape())


def compare(found: dict[str, TensorType], expected: dict[str, TensorType], *, tied: bool) -> None:
    """Raise CheckpointError unless names, shapes and types match the checkpoint that the server was started with.

    With tied embeddings a checkpoint may include or omit the output layer's copy.
    """
    spare = {HEAD} if tied else set()
    if missing := sorted(expected.keys() - found.keys() - spare):
        raise CheckpointError(f"{len(missing)} tensors are missing, {missing[0]} for one")
    if unknown := sorted(found.keys() - expected.keys() - spare):
        raise CheckpointError(f"{len(unknown)} tensors are not the model's, {unknown[0]} for one")
    for name in sorted(found.keys() & expected.keys()):
        kind, wanted = found[name], expected[name]
        if kind.shape != wanted.shape:
            raise CheckpointError(f"{name} has shape {kind.shape}, the model's is {wanted.shape}")
        if kind.type != wanted.type and not {kind.type, wanted.type} <= FLOATS:
            raise CheckpointError(f"{name} is of type {kind.type}, the model's is {wanted.type}")


class WorkerExtension:
    """Mixed into vLLM's worker class; `self` is the worker."""

    headrace_kinds: dict[str, TensorType]

    def headrace_check(self: Any, folder: str) -> dict[str, Any]:
        """Whether a load would be accepted. `folder`: a path on this machine."""
        try:
            with self.headrace_open(folder) as checkpoint:
                return {"tensors": len(checkpoint.files), "bytes": checkpoint.size_bytes}
        except CheckpointError as error:
            return {"refused": str(error)}

    def headrace_load(self: Any, folder: str) -> dict[str, Any]:
        """Replaces the model's weights in place, or refuses and leaves them as they are."""
        try:
            checkpoint = self.headrace_open(folder)
        except CheckpointError as error:
            return {"refused": str(error)}
        with checkpoint:
            try:
                self.reload_weights(weights_iterator=checkpoint.tensors())
            except Exception as error:
                logger.exception("headrace: loading %s failed half-way", folder)
                self.headrace_mend()
                return {"mixed": f"{type(error).__name__}: {error}"}
            finally:
                _repack_tied(self.model_runner.get_model())
            return {"tensors": len(checkpoint.files), "bytes": checkpoint.size_bytes}

    def headrace_open(self: Any, folder: str) -> Checkpoint:
        """The folder, if it fits. Raises CheckpointError."""
        if not hasattr(self, "headrace_kinds"):  # once: that folder may be gone later
            with Checkpoint(_local(self.model_config)) as started_with:
                self.headrace_kinds = started_with.kinds
        tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        checkpoint = Checkpoint(folder)
        try:
            compare(checkpoint.kinds, self.headrace_kinds, tied=tied)
        except CheckpointError as error:
            checkpoint.close()
            raise CheckpointError(f"{folder}: {error}") from None
        return checkpoint

    def headrace_mend(self: Any) -> None:
        """Ends a reload that was begun, so that every layer has tensors again: without, the next request kills the
        server."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)


def _local(model_config: Any) -> str:
    """The folder of the checkpoint that the server was started with."""
    if Path(model_config.model).is_dir():
        return str(model_config.model)
    from huggingface_hub import snapshot_download

    return str(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))


def _repack_tied(model: Any) -> None:
    """CPUs multiply with a packed copy of each matrix, made when its layer is loaded. An output layer that shares the
    input embeddings is never loaded itself, so its copy has to be made anew."""
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
