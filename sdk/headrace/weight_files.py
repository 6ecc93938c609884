"""Weight files of a folder: the tensors that their headers name, and the digest that ties a version to its bytes.

* Only headers are read to compare names and shapes: a few kilobytes of any size of model.
* A digest has a part for the headers and one for the contents; a difference in the first needs no read of the tensors.
* Contents are hashed in parallel, and once as long as a file keeps its size and times.
* A file that changes while it is hashed is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

WeightsKind = Literal["full", "adapter"]

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Files of an adapter in PEFT's layout; it has one of them, and the first is preferred."""

CHUNK_BYTES = 16 << 20
"""Size of the pieces that are hashed in parallel."""

MAX_THREADS = 8

SETTLED_NS = 2_000_000_000
"""Age of a file's last change from which its hash is remembered: file systems round times, and a second change within
the same tick would go unnoticed."""

MAX_HEADER_BYTES = 100_000_000
"""Longest header of a safetensors file, as the format limits it."""

MAX_REMEMBERED = 4096

_HEX = 32
_remembered: dict[str, tuple[FileState, bytes]] = {}


class WeightFilesError(ValueError):
    """The weight files cannot be used; the message says why. ``kind``: a code of an InvalidWeights error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class TensorType(NamedTuple):
    """Element type and shape of a tensor, as safetensors writes them."""

    type: str
    shape: list[int]


class FileState(NamedTuple):
    """The properties of a file that change with its contents."""

    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int


def weight_paths(folder: str | os.PathLike[str], kind: WeightsKind) -> list[Path]:
    """The files that determine the weights, by name. Raises WeightFilesError ``weights-missing``."""
    path = Path(folder)
    if kind == "adapter":
        weights = [path / name for name in ADAPTER_FILES if (path / name).is_file()][:1]
        config = [path / ADAPTER_CONFIG] if weights and (path / ADAPTER_CONFIG).is_file() else []
    else:
        weights, config = sorted(file for file in path.glob("*.safetensors") if not file.name.startswith(".")), []
    if not weights:
        wanted = ADAPTER_FILES[0] if kind == "adapter" else "*.safetensors"
        raise WeightFilesError(
            "weights-missing",
            f"{folder}: {f'it has no {wanted}' if path.is_dir() else 'the folder does not exist here'}",
        )
    return [*config, *weights]


def read_header(path: Path) -> dict[str, TensorType]:
    """The tensors of a safetensors file by name. Raises WeightFilesError ``weights-damaged``."""
    try:
        text, size_bytes = _header_bytes(path), path.stat().st_size
        entries = json.loads(text)
        end = max((entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"), default=0)
        if size_bytes < 8 + len(text) + end:
            raise ValueError(f"it has {size_bytes} bytes, and its header names {8 + len(text) + end}")
        return {
            name: TensorType(entry["dtype"], entry["shape"])
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightFilesError(
            "weights-damaged", f"{path} is not a complete safetensors file, or is still being written: {error}"
        ) from error


def _header_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError("its header is too long")
        text = file.read(length)
    if len(text) < length:
        raise ValueError("its header is cut short")
    return text


# Digests


def weight_digest(folder: str | os.PathLike[str], kind: WeightsKind) -> str:
    """The digest of a folder's weights: two hexadecimal numbers of 128 bits. Raises WeightFilesError."""
    paths = weight_paths(folder, kind)
    return f"{_headers_digest(paths)}.{_contents_digest(paths)}"


def require_digest(folder: str | os.PathLike[str], kind: WeightsKind, digest: str) -> None:
    """Raise WeightFilesError ``weights-changed`` if the folder's weights have another digest."""
    paths = weight_paths(folder, kind)
    headers, _, contents = digest.partition(".")
    part = "names, shapes or sizes" if _headers_digest(paths) != headers else ""
    if not part and _contents_digest(paths) != contents:
        part = "values"
    if part:
        raise WeightFilesError(
            "weights-changed", f"{folder}: its {part} are not those that were announced: were its files replaced?"
        )


def file_states(folder: str | os.PathLike[str], kind: WeightsKind) -> list[FileState]:
    """The states of the weight files, which differ after any change. Raises WeightFilesError."""
    return [_state(path) for path in weight_paths(folder, kind)]


def _headers_digest(paths: Sequence[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        header = b""
        if path.suffix == ".safetensors":
            read_header(path)
            header = _header_bytes(path)
        total.update(f"{path.name}\0{_state(path).size_bytes}\0{len(header)}\0".encode() + header)
    return total.hexdigest()[:_HEX]


def _contents_digest(paths: Sequence[Path]) -> str:
    return hashlib.sha256(b"".join(_file_digest(path) for path in paths)).hexdigest()[:_HEX]


def _file_digest(path: Path) -> bytes:
    state, name = _state(path), str(path.absolute())
    known = _remembered.get(name)
    if known is not None and known[0] == state:
        return known[1]
    starts = range(0, state.size_bytes, CHUNK_BYTES)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1, max(1, len(starts)))) as threads:
        digest = hashlib.sha256(b"".join(threads.map(lambda start: _chunk_digest(path, start), starts))).digest()
    if _state(path) != state:
        raise WeightFilesError("weights-damaged", f"{path} is still being written")
    if time.time_ns() - max(state.modified_ns, state.changed_ns) > SETTLED_NS:
        if len(_remembered) >= MAX_REMEMBERED:
            _remembered.clear()
        _remembered[name] = state, digest
    return digest


def _chunk_digest(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(CHUNK_BYTES)).digest()


def _state(path: Path) -> FileState:
    try:
        found = path.stat()
    except OSError as error:
        raise WeightFilesError("weights-missing", f"{path}: {error.strerror}") from error
    return FileState(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
