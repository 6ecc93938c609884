"""The cost of the digest of an announcement: the first time, again for unchanged files, and for other headers.

* The reference is one thread that hashes the same bytes from memory.
* Files are in the page cache, as after a learner wrote them.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.table import Row
from headrace import weight_files
from headrace.weight_files import WeightFilesError, require_digest, weight_digest

FILES, FILE_BYTES, ROUNDS = 2, 256 << 20, 3


def rows() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        folder = Path(name)
        values = os.urandom(FILE_BYTES)
        for number in range(FILES):
            _write(folder / f"model-{number}.safetensors", values, "w")
        total_gb = FILES * FILE_BYTES / 1e9
        reference_s = FILES * min(_duration_s(lambda: hashlib.sha256(values).digest()) for _ in range(ROUNDS))
        first_s = min(_duration_s(lambda: _digest_anew(folder)) for _ in range(ROUNDS))
        digest = weight_digest(folder, "full")
        while len(weight_files._remembered) < FILES:  # once the files' last change is old enough
            weight_digest(folder, "full")
        again_s = _duration_s(lambda: require_digest(folder, "full", digest))
        _write(folder / "model-0.safetensors", values, "v")
        other_s = _duration_s(lambda: _refused(folder, digest))
    print(f"digest of {total_gb:.2f} GB: {first_s:.2f} s; again {1e3 * again_s:.2f} ms; headers {1e3 * other_s:.2f} ms")
    return [
        Row("digest of weights", total_gb / first_s, "GB/s", "one thread", total_gb / reference_s, 0.9, "higher"),
        Row("digest of unchanged weights", 1e3 * again_s, "ms", "goal", 5.0, 1.0, "lower"),
        Row("digest with other headers", 1e3 * other_s, "ms", "goal", 5.0, 1.0, "lower"),
    ]


def _digest_anew(folder: Path) -> None:
    weight_files._remembered.clear()
    weight_digest(folder, "full")


def _write(path: Path, values: bytes, tensor: str) -> None:
    header = f'{{"{tensor}":{{"dtype":"U8","shape":[{len(values)}],"data_offsets":[0,{len(values)}]}}}}'.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + values)


def _refused(folder: Path, digest: str) -> None:
    try:
        require_digest(folder, "full", digest)
    except WeightFilesError:
        return
    raise AssertionError("other files were taken for the announced ones")


def _duration_s(work: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at
