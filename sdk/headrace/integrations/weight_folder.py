"""Folders of weights that policy servers can load.

* A folder exists completely or not at all, even after a crash.
* It holds the other files of the model's folder: config, tokenizer, chat template.
* The newest folders are kept, so that a server that loads late still finds an announced folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import InvalidRequest, MissingExtra

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 4 << 30
"""Size from which a weight file is closed, which bounds the memory in use."""

WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
"""Suffixes of weight files in a model's folder, which are not copied."""


class WeightFolder:
    """Writes the weights of each step into its own folder below ``folder``, which servers access by the same path.

    ``model``: the folder of the model, as ``save_pretrained`` writes it. ``keep``: number of steps to keep.
    ``newest`` is the folder of the last step, None before the first. Raises InvalidRequest if ``model`` is not such a
    folder.
    """

    def __init__(self, model: str | os.PathLike[str], folder: str | os.PathLike[str], *, keep: int = 3) -> None:
        self._model, self._folder, self._keep = Path(model), Path(folder).absolute(), keep
        self.newest: Path | None = None
        if not (self._model / "config.json").is_file():
            raise InvalidRequest(
                f"{self._model} is not the folder of a model: it has no config.json.",
                hint="Save the model and its tokenizer there with save_pretrained; a name on the hub is not a folder.",
            )

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Path:
        """Write the weights of one step, by name; returns their folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        steps = self._steps()
        number = int(steps[-1].name.removeprefix("step-")) + 1 if steps else 1
        folder = self._folder / f".step-{number:06d}.part"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._copy_other_files(folder)
        _save(folder, tensors)
        for path in folder.iterdir():
            _sync(path)
        _sync(folder)
        self.newest = folder.rename(self._folder / f"step-{number:06d}")
        _sync(self._folder)
        for old in self._steps()[: -self._keep]:
            shutil.rmtree(old)
        return self.newest

    def _steps(self) -> list[Path]:
        return sorted(self._folder.glob("step-*"))

    def _copy_other_files(self, folder: Path) -> None:
        for path in self._model.iterdir():
            if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES):
                shutil.copyfile(path, folder / path.name)


def _save(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise MissingExtra("Writing weights needs safetensors.", hint="Run: pip install safetensors") from error
    files: dict[str, str] = {}
    for number, shard in enumerate(_shards(tensors), 1):
        name = f"model-{number:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, name))
    if not files:
        raise InvalidRequest("The list of weights is empty.", hint="Give the model's parameters, by name.")
    if len(set(files.values())) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
    else:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def _shards(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size_bytes = 0
    for name, tensor in tensors:
        shard[name] = tensor.detach().cpu().contiguous()
        size_bytes += tensor.numel() * tensor.element_size()
        if size_bytes >= SHARD_BYTES:
            yield shard
            shard, size_bytes = {}, 0
    if shard:
        yield shard


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
