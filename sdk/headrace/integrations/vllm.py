"""The worker extension of vLLM servers, which loads weights from a folder exactly or not at all.

    vllm serve MODEL --worker-extension-cls headrace.integrations.vllm.WorkerExtension    # and VLLM_SERVER_DEV_MODE=1

* `headrace_check` checks that a folder's safetensors files match the model, and changes nothing. A folder that does not
  exist, is incomplete or truncated, or has other names or shapes is refused with the reason.
* `headrace_load` checks again, then loads in place. Tied embeddings are updated too, also on CPUs, where vLLM's own
  reload keeps the packed copy of the old ones.
* `headrace_check_adapter` checks that an adapter's tensors fit the modules that take adapters. vLLM itself ignores
  tensors of other names, and would sample from the base model.
* With a digest, files that are not the announced ones are refused. They are hashed in a thread while the engine goes
  on, and the answer is `pending` until that is done.
* Files that change during a load leave mixed weights.
* A load that fails half-way leaves mixed weights and reports it as `mixed`; a later load can repair them.
* The caller must pause running requests and clear caches during a load: `POST /pause` does both.

All are called with `POST /collective_rpc {"method": …, "args": [folder, digest]}`, where the digest may be missing,
and return one dict for each worker: `{"tensors": n, "bytes": n}`, `{"pending": true}`,
`{"refused": "why", "kind": code}` or `{"mixed": "why"}`. The module needs only vLLM.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from headrace.adapter_tensors import listed, module_of, require_adapter_fits
from headrace.weight_files import (
    FileState,
    TensorType,
    WeightFilesError,
    WeightsKind,
    file_states,
    read_header,
    require_digest,
    weight_paths,
)

logger = logging.getLogger(__name__)

HEAD = "lm_head.weight"


PENDING_AFTER_S = 0.02
"""Time for which a check waits for the digest. The engine samples nothing meanwhile."""

FLOATS = {"F64", "F32", "F16", "BF16"}
"""Types that are interchangeable: a learner may train in another precision than it serves."""


class Checkpoint(ExitStack):
    """The open safetensors files of a folder: file and type of each tensor, by name. Raises WeightFilesError."""

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

        for path in weight_paths(folder, "full"):
            try:
                file = self.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise WeightFilesError(
                    "weights-damaged", f"{path} is not a complete safetensors file, or is still being written: {error}"
                ) from None
            self.size_bytes += os.stat(path).st_size
            for name in file.keys():  # noqa: SIM118  (not a dict)
                if name in self.files:
                    raise WeightFilesError("weights-damaged", f"{path}: {name} is also in another file of the folder")
                self.files[name] = file
                entry = file.get_slice(name)
                self.kinds[name] = TensorType(entry.get_dtype(), entry.get_shape())


def compare(checkpoint: dict[str, TensorType], expected: dict[str, TensorType], *, tied: bool) -> None:
    """Raise WeightFilesError ``weights-do-not-fit`` unless names, shapes and types match the checkpoint that the server
    was started with. The message lists what differs.

    With tied embeddings a checkpoint may include or omit the output layer's copy.
    """
    spare = {HEAD} if tied else set()
    problems = [f"{name} is missing" for name in sorted(expected.keys() - checkpoint.keys() - spare)]
    problems += [f"{name} is not in the model" for name in sorted(checkpoint.keys() - expected.keys() - spare)]
    for name in sorted(checkpoint.keys() & expected.keys()):
        kind, own = checkpoint[name], expected[name]
        if kind.shape != own.shape:
            problems.append(f"{name} has shape {kind.shape}, in the model {own.shape}")
        elif kind.type != own.type and not {kind.type, own.type} <= FLOATS:
            problems.append(f"{name} has type {kind.type}, in the model {own.type}")
    if problems:
        raise WeightFilesError("weights-do-not-fit", listed(problems))


class WorkerExtension:
    """Methods that vLLM adds to its worker class; `self` is the worker."""

    headrace_kinds: dict[str, TensorType]

    def headrace_check(self: Any, folder: str, digest: str = "") -> dict[str, Any]:
        """Check a folder without loading it. `folder`: a path on this machine."""
        try:
            with self.headrace_open(folder) as checkpoint:
                if not self.headrace_hashed(folder, "full", digest):
                    return {"pending": True}
                return {"tensors": len(checkpoint.files), "bytes": checkpoint.size_bytes}
        except WeightFilesError as error:
            return {"refused": str(error), "kind": error.kind}

    def headrace_check_adapter(self: Any, folder: str, digest: str = "") -> dict[str, Any]:
        """Check that the tensors of an adapter fit this model. `folder`: a path on this machine."""
        try:
            tensors = _adapter_tensors(folder)
            shapes = {
                name.removesuffix(".weight"): kind.shape
                for name, kind in self.headrace_base_kinds().items()
                if kind.type in FLOATS  # a quantized weight has another shape
            }
            require_adapter_fits(folder, tensors, self.headrace_known_modules(shapes), shapes)
            if not self.headrace_hashed(folder, "adapter", digest):
                return {"pending": True}
        except WeightFilesError as error:
            return {"refused": str(error), "kind": error.kind}
        return {"tensors": len(tensors)}

    def headrace_load(self: Any, folder: str, digest: str = "") -> dict[str, Any]:
        """Replace the model's weights in place, or refuse and leave them unchanged."""
        try:
            states = file_states(folder, "full")
            self.headrace_hashed(folder, "full", digest, loading=True)
            checkpoint = self.headrace_open(folder)
        except WeightFilesError as error:
            return {"refused": str(error), "kind": error.kind}
        with checkpoint:
            try:
                self.reload_weights(weights_iterator=checkpoint.tensors())
            except Exception as error:
                logger.exception("headrace: loading %s failed half-way", folder)
                self.headrace_mend()
                return {"mixed": f"{type(error).__name__}: {error}"}
            finally:
                _repack_tied(self.model_runner.get_model())
            if _states(folder) != states:
                return {"mixed": f"{folder}: its files changed during the load"}
            return {"tensors": len(checkpoint.files), "bytes": checkpoint.size_bytes}

    def headrace_open(self: Any, folder: str) -> Checkpoint:
        """Open a folder and check that it matches the model. Raises WeightFilesError."""
        expected = self.headrace_base_kinds()
        tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        checkpoint = Checkpoint(folder)
        try:
            compare(checkpoint.kinds, expected, tied=tied)
        except WeightFilesError as error:
            checkpoint.close()
            raise WeightFilesError(error.kind, f"{folder}: {error}") from None
        return checkpoint

    def headrace_base_kinds(self: Any) -> dict[str, TensorType]:
        """The tensors of the checkpoint that the server was started with."""
        if not hasattr(self, "headrace_kinds"):  # only once: that folder may be deleted later
            with Checkpoint(_local(self.model_config)) as started_with:
                self.headrace_kinds = started_with.kinds
        kinds: dict[str, TensorType] = self.headrace_kinds
        return kinds

    def headrace_known_modules(self: Any, base: Container[str]) -> Callable[[str], bool]:
        """A function that returns True for a tensor whose module takes an adapter in this engine. `base`: the modules
        of the whole model."""
        from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name

        worker_manager = getattr(self.model_runner, "lora_manager", None)
        if worker_manager is None:
            raise WeightFilesError("adapter-does-not-fit", "the server was started without --enable-lora")
        manager = worker_manager._adapter_manager
        modules = {*manager.modules, *(name for names in manager.packed_modules.values() for name in names)}
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        mapper = None if mapper is None else mapper.get_rename_mapper()
        in_parts = self.vllm_config.parallel_config.pipeline_parallel_size > 1

        def known(tensor: str) -> bool:
            if is_base_embedding_weights(tensor):
                return True  # a copy of the base's
            try:
                module, _ = parse_fine_tuned_lora_name(tensor, mapper)
            except ValueError:
                return False
            # Another process may have the module; and vLLM itself checks experts and classification heads.
            elsewhere = (in_parts and module_of(tensor) in base) or module in ("score", "classifier")
            return module in modules or elsewhere or ".experts" in module

        return known

    def headrace_hashed(self: Any, folder: str, kind: WeightsKind, digest: str, *, loading: bool = False) -> bool:
        """Return True once the files are known to have the digest; in a load only then. Raises WeightFilesError."""
        if not digest:
            return True
        states, checked = file_states(folder, kind), getattr(self, "headrace_checked", None)
        if checked == (folder, digest, states):
            return True
        if loading and checked is not None and checked[:2] == (folder, digest):  # all processes see it alike
            raise WeightFilesError("weights-changed", f"{folder}: its files changed after they were checked")
        if not loading and getattr(self, "local_rank", 0) != 0:  # one process on each machine hashes
            self.headrace_checked = folder, digest, states
            return True
        if not self.headrace_hash(folder, kind, digest, states, None if loading else PENDING_AFTER_S):
            return False
        # Files that changed since the hashing began are hashed again.
        return self.headrace_checked[2] == states or bool(self.headrace_hashed(folder, kind, digest))

    def headrace_hash(
        self: Any, folder: str, kind: WeightsKind, digest: str, states: list[FileState], wait_s: float | None
    ) -> bool:
        """Hash the files in a thread, or go on waiting for it; return False if it needs longer. Raises
        WeightFilesError."""
        hashing = getattr(self, "headrace_hashing", None)
        if hashing is None or hashing[0] != (folder, digest):
            thread = ThreadPoolExecutor(1, "headrace-hash")
            hashing = (folder, digest), states, thread.submit(require_digest, folder, kind, digest)
            thread.shutdown(wait=False)
            self.headrace_hashing = hashing
        _, states_before, result = hashing
        if not wait_for([result], wait_s).done:
            return False
        self.headrace_hashing = None
        result.result()
        self.headrace_checked = folder, digest, states_before
        return True

    def headrace_mend(self: Any) -> None:
        """Finish an interrupted reload, so that every layer has tensors again: otherwise the next request crashes the
        server."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)


def _adapter_tensors(folder: str) -> dict[str, TensorType]:
    """The tensors of an adapter in PEFT's layout. Raises WeightFilesError."""
    path = weight_paths(folder, "adapter")[-1]
    if path.suffix == ".safetensors":
        return read_header(path)
    import torch

    try:
        loaded = torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:
        raise WeightFilesError("weights-damaged", f"{path} cannot be read: {error}") from error
    return {name: TensorType(str(tensor.dtype), list(tensor.shape)) for name, tensor in loaded.items()}


def _states(folder: str) -> list[FileState] | None:
    try:
        return file_states(folder, "full")
    except WeightFilesError:
        return None  # a file has vanished


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
