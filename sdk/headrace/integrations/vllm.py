"""The worker extension of vLLM servers, which loads weights from a folder exactly or not at all.

    vllm serve MODEL --worker-extension-cls headrace.integrations.vllm.WorkerExtension    # and VLLM_SERVER_DEV_MODE=1

* `headrace_check` checks that a folder's safetensors files match the model, and changes nothing. A folder that does not
  exist, is incomplete or truncated, or has other names or shapes is refused with the reason.
* `headrace_load` checks again, then loads in place. Tied embeddings are updated too, also on CPUs, where vLLM's own
  reload keeps the packed copy of the old ones.
* A load that fails half-way leaves mixed weights and reports it as `mixed`; a later load can repair them.
* The caller must pause running requests and clear caches during a load: `POST /pause` does both.

Both are called with `POST /collective_rpc {"method": …, "args": [folder]}` and return one dict for each worker:
`{"tensors": n, "bytes": n}`, `{"refused": "why"}` or `{"mixed": "why"}`. The module needs only vLLM.
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
"""Types that are interchangeable: a learner may train in another precision than it serves."""


class CheckpointError(ValueError):
    """The checkpoint in a folder cannot be loaded; the message says why."""


class TensorType(NamedTuple):
    """Element type and shape of a tensor, as safetensors writes them."""

    type: str
    shape: list[int]


class Checkpoint(ExitStack):
    """The open safetensors files of a folder: file and type of each tensor, by name. Raises CheckpointError."""

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
                f"{folder}: {'it has no *.safetensors' if folder.is_dir() else 'the folder does not exist here'}"
            )
        for path in paths:
            try:
                file = self.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} is not a complete safetensors file, or is still being written: {error}"
                ) from None
            self.size_bytes += os.stat(path).st_size
            for name in file.keys():  # noqa: SIM118  (not a dict)
                if name in self.files:
                    raise CheckpointError(f"{path}: {name} is also in another file of the folder")
                self.files[name] = file
                entry = file.get_slice(name)
                self.kinds[name] = TensorType(entry.get_dtype(), entry.get_shape())


def compare(checkpoint: dict[str, TensorType], expected: dict[str, TensorType], *, tied: bool) -> None:
    """Raise CheckpointError unless names, shapes and types match the checkpoint that the server was started with.

    With tied embeddings a checkpoint may include or omit the output layer's copy.
    """
    spare = {HEAD} if tied else set()
    if missing := sorted(expected.keys() - checkpoint.keys() - spare):
        raise CheckpointError(f"{len(missing)} tensors are missing, such as {missing[0]}")
    if unknown := sorted(checkpoint.keys() - expected.keys() - spare):
        raise CheckpointError(f"{len(unknown)} tensors are not in the model, such as {unknown[0]}")
    for name in sorted(checkpoint.keys() & expected.keys()):
        kind, own = checkpoint[name], expected[name]
        if kind.shape != own.shape:
            raise CheckpointError(f"{name} has shape {kind.shape}, in the model {own.shape}")
        if kind.type != own.type and not {kind.type, own.type} <= FLOATS:
            raise CheckpointError(f"{name} has type {kind.type}, in the model {own.type}")


class WorkerExtension:
    """Methods that vLLM adds to its worker class; `self` is the worker."""

    headrace_kinds: dict[str, TensorType]

    def headrace_check(self: Any, folder: str) -> dict[str, Any]:
        """Check a folder without loading it. `folder`: a path on this machine."""
        try:
            with self.headrace_open(folder) as checkpoint:
                return {"tensors": len(checkpoint.files), "bytes": checkpoint.size_bytes}
        except CheckpointError as error:
            return {"refused": str(error)}

    def headrace_load(self: Any, folder: str) -> dict[str, Any]:
        """Replace the model's weights in place, or refuse and leave them unchanged."""
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
        """Open a folder and check that it matches the model. Raises CheckpointError."""
        if not hasattr(self, "headrace_kinds"):  # only once: that folder may be deleted later
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
        """Finish an interrupted reload, so that every layer has tensors again: otherwise the next request crashes the
        server."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)


def _local(model_config: Any) -> str:
    """The folder of the checkpoint with which the server was started."""
    if Path(model_config.model).is_dir():
        return str(model_config.model)
    from huggingface_hub import snapshot_download

    return str(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))


def _repack_tied(model: Any) -> None:
    """Update the packed copy of tied output layers on CPUs.

    CPUs multiply with a packed copy of each matrix, which is made when its layer is loaded. An output layer that shares
    the input embeddings is never loaded itself.
    """
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
