"""Stored assets: files below ``<data directory>/assets`` that can be read without a service.

* An asset is stored as ``ab/abcdef...``: its name, in a folder named by the first two letters.
* An asset is read only if its bytes match its name.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from headrace.assets import check_asset, corrupt_asset, is_asset_name
from headrace.errors import UnknownAsset
from headrace.store.regular_files import open_to_read, read_file

FOLDER = "assets"
"""Folder of the assets in a data directory."""

_CHUNK_BYTES = 1 << 20


def asset_path(folder: Path, name: str) -> Path:
    """The path of an asset below the folder of all assets."""
    return folder / name[:2] / name


def read_asset(folder: Path, name: str) -> bytes:
    """Read a stored asset and check it against its name. Raises UnknownAsset, CorruptAsset."""
    if not is_asset_name(name):
        raise unknown_asset(name)
    try:
        data = read_file(asset_path(folder, name))
    except FileNotFoundError:
        raise unknown_asset(name) from None
    except OSError as error:
        raise corrupt_asset(name, f"its file cannot be read: {error.strerror}") from error
    check_asset(name, data)
    return data


def verify_asset(folder: Path, name: str) -> int:
    """Check a stored asset without holding it in memory; returns its size in bytes.

    Raises UnknownAsset, CorruptAsset.
    """
    if not is_asset_name(name):
        raise corrupt_asset(name, "its name is not a SHA-256")
    digest, size = hashlib.sha256(), 0
    try:
        with open_to_read(asset_path(folder, name)) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
    except FileNotFoundError:
        raise unknown_asset(name) from None
    except OSError as error:
        raise corrupt_asset(name, f"its file cannot be read: {error.strerror}") from error
    if digest.hexdigest() != name:
        raise corrupt_asset(name, f"its {size} bytes have the SHA-256 {digest.hexdigest()}")
    return size


def unknown_asset(name: str) -> UnknownAsset:
    return UnknownAsset(
        f"The asset {name[:80]!r} is not stored.",
        hint="Assets are named by the SHA-256 of their bytes, and are kept as long as a stored trajectory refers to "
        "them.",
        asset=name[:80],
    )
