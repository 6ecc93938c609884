"""Headers and digests of weight files: they follow the bytes, and nothing else."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from headrace import weight_files
from headrace.weight_files import (
    ADAPTER_CONFIG,
    TensorType,
    WeightFilesError,
    file_states,
    read_header,
    require_digest,
    weight_digest,
    weight_paths,
)

YEAR_2020_NS = 1_577_836_800_000_000_000


def write(path: Path, values: bytes, name: str = "w") -> None:
    """Write a safetensors file with one tensor of bytes, which was last changed long ago."""
    header = json.dumps({name: {"dtype": "U8", "shape": [len(values)], "data_offsets": [0, len(values)]}}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header + values)
    os.utime(path, ns=(YEAR_2020_NS, YEAR_2020_NS))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose contents were read, once for each piece."""
    names: list[str] = []
    lock, real = threading.Lock(), weight_files._chunk_digest

    def record(path: Path, start: int) -> bytes:
        with lock:
            names.append(path.name)
        return real(path, start)

    monkeypatch.setattr(weight_files, "_chunk_digest", record)
    monkeypatch.setattr(weight_files, "_remembered", {})
    monkeypatch.setattr(weight_files, "SETTLED_NS", -YEAR_2020_NS)  # the time of the last change cannot be set
    return names


def test_only_headers_are_read_to_compare_names_and_shapes(tmp_path: Path, hashed: list[str]) -> None:
    write(tmp_path / "a.safetensors", b"12345")
    assert read_header(tmp_path / "a.safetensors") == {"w": TensorType("U8", [5])}
    assert hashed == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:4],
        lambda data: data[:20],
        lambda data: data[:-1],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"[" + data[9:],
        lambda data: (2).to_bytes(8, "little") + b"[]",
        lambda data: (13).to_bytes(8, "little") + b'{"w": {"a":1}',
    ],
)
def test_a_damaged_or_incomplete_file_is_refused(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "a.safetensors"
    write(path, b"12345")
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    for refused in (lambda: read_header(path), lambda: weight_digest(tmp_path, "full")):
        with pytest.raises(WeightFilesError, match="is not a complete safetensors file") as caught:
            refused()
        assert caught.value.kind == "weights-damaged"


def test_a_digest_follows_the_bytes_of_all_weight_files_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "one" / "a.safetensors", b"12345")
    write(tmp_path / "one" / "b.safetensors", b"67890")
    write(tmp_path / "two" / "b.safetensors", b"67890")
    write(tmp_path / "two" / "a.safetensors", b"12345")
    first = weight_digest(tmp_path / "one", "full")
    for other in ("optimizer.pt", ".a.safetensors", "config.json"):
        (tmp_path / "one" / other).write_text("x")
    assert weight_digest(tmp_path / "one", "full") == weight_digest(tmp_path / "two", "full") == first
    write(tmp_path / "two" / "b.safetensors", b"67891")
    assert weight_digest(tmp_path / "two", "full") != first
    require_digest(tmp_path / "one", "full", first)


def test_a_digest_of_an_adapter_covers_its_configuration(tmp_path: Path) -> None:
    write(tmp_path / "adapter_model.safetensors", b"12345")
    (tmp_path / ADAPTER_CONFIG).write_text('{"lora_alpha": 4}')
    first = weight_digest(tmp_path, "adapter")
    (tmp_path / ADAPTER_CONFIG).write_text('{"lora_alpha": 8}')
    assert weight_digest(tmp_path, "adapter") != first


def test_a_difference_in_the_headers_needs_no_read_of_the_tensors(tmp_path: Path, hashed: list[str]) -> None:
    write(tmp_path / "a.safetensors", b"12345")
    digest = weight_digest(tmp_path, "full")
    write(tmp_path / "a.safetensors", b"12345", name="v")
    hashed.clear()
    with pytest.raises(
        WeightFilesError, match="its names, shapes or sizes are not those that were announced"
    ) as caught:
        require_digest(tmp_path, "full", digest)
    assert (caught.value.kind, hashed) == ("weights-changed", [])


def test_contents_are_hashed_once_as_long_as_size_and_times_stay(tmp_path: Path, hashed: list[str]) -> None:
    write(tmp_path / "a.safetensors", b"12345")
    write(tmp_path / "b.safetensors", b"12345")
    digest = weight_digest(tmp_path, "full")
    require_digest(tmp_path, "full", digest)
    assert sorted(hashed) == ["a.safetensors", "b.safetensors"]
    write(tmp_path / "b.safetensors", b"54321")  # the same size and time of modification
    with pytest.raises(WeightFilesError, match="its values are not those that were announced"):
        require_digest(tmp_path, "full", digest)
    assert sorted(hashed) == ["a.safetensors", "b.safetensors", "b.safetensors"]


def test_a_file_that_was_changed_just_now_is_not_remembered(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "SETTLED_NS", 3_600_000_000_000)
    write(tmp_path / "a.safetensors", b"12345")
    assert weight_digest(tmp_path, "full") == weight_digest(tmp_path, "full")
    assert len(hashed) == 2


def test_large_files_are_hashed_in_pieces(tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "CHUNK_BYTES", 100)
    write(tmp_path / "a.safetensors", bytes(950))
    first = weight_digest(tmp_path, "full")
    assert len(hashed) > 9
    write(tmp_path / "a.safetensors", bytes(949) + b"1")
    assert weight_digest(tmp_path, "full") != first


def test_a_file_that_changes_while_it_is_hashed_is_refused(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.safetensors", b"12345")
    real = weight_files._chunk_digest

    def change(path: Path, start: int) -> bytes:
        digest = real(path, start)
        write(path, b"123456")
        return digest

    monkeypatch.setattr(weight_files, "_chunk_digest", change)
    with pytest.raises(WeightFilesError, match="is still being written"):
        weight_digest(tmp_path, "full")


def test_the_states_of_files_differ_after_any_change(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", b"12345")
    before = file_states(tmp_path, "full")
    assert before == file_states(tmp_path, "full")
    write(tmp_path / "a.safetensors", b"54321")
    assert file_states(tmp_path, "full") != before


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_a_folder_without_weights_is_named(tmp_path: Path, kind: weight_files.WeightsKind) -> None:
    with pytest.raises(WeightFilesError, match="it has no ") as caught:
        weight_paths(tmp_path, kind)
    assert caught.value.kind == "weights-missing"
    with pytest.raises(WeightFilesError, match="the folder does not exist here"):
        weight_paths(tmp_path / "nowhere", kind)
