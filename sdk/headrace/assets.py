"""Assets: images and other large arrays beside a trajectory, named by what is in them.

* The name of an asset is the SHA-256 of its bytes, in lower-case hexadecimal: equal bytes have one name.
* Bytes that are not those of their name are never given out.
* An array is the bytes of an ``.npy`` file, which says its dtype and shape, and decodes to a read-only view.
* Only numbers are arrays: nothing is ever unpickled.
* Stored assets are files, ``<data directory>/assets/ab/abcdef...``, which can be read without a service.

::

    routed = encode_array(experts)                                     # u1[tokens, layers, k], say
    segment = Segment(..., arrays={"routed_experts": routed.name})     # and routed.entry under Trajectory.assets
    experts = decode_array(client.asset(segment.arrays["routed_experts"]))
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.errors import (
    CorruptAsset,
    HeadraceError,
    InvalidAsset,
    InvalidRequest,
    UnknownAsset,
    WrongDtype,
    WrongShape,
    from_problem,
)
from headrace.trajectory import Asset
from headrace.wire import messages
from headrace.wire.alignment import ALIGNMENT, padded

ARRAY_MEDIA_TYPE = "application/x-npy"
"""Media type of an array, an image that was given as one included."""

FOLDER = "assets"
"""Where assets are in a data directory."""

_LENGTH = struct.Struct("<I")
_NAME = re.compile(r"[0-9a-f]{64}")
_NUMBERS = "biuf"
_NPY_HEAD = re.compile(
    rb"\x93NUMPY\x01\x00(?P<length>..)"
    rb"\{'descr': '(?P<dtype>[<>|][biuf]\d{1,2})', 'fortran_order': False, "
    rb"'shape': \((?P<shape>|\d{1,18},|\d{1,18}(?:, \d{1,18})+)\), \} *\n",
    re.DOTALL,
)
"""How an array in C order begins. It is matched, since numpy's own reader evaluates it."""
_MAX_HEADER = 1024
"""Bytes of an ``.npy`` header; some 128 in practice."""
_MAX_DIMENSIONS = 32
_CHANNELS = (1, 3, 4)
_CHUNK_BYTES = 1 << 20


class AssetData(NamedTuple):
    """An asset with its bytes."""

    name: str
    media_type: str
    data: bytes

    @property
    def entry(self) -> Asset:
        """How a trajectory lists it."""
        return Asset(name=self.name, media_type=self.media_type, size_bytes=len(self.data))


@dataclass(frozen=True, eq=False, kw_only=True)
class Image:
    """An image that an environment shows, as a part of an observation.

    ``data``: an encoded image with its ``media_type``, such as ``"image/png"``; or a u1 array ``[height, width]`` or
    ``[height, width, channels]`` with 1, 3 or 4 channels, which is stored as it is. It is copied when it is observed,
    so that the same buffer may be shown again with other content. ``text`` stands for the image where the policy reads
    text only; without it, such a policy cannot play the episode.
    """

    data: bytes | bytearray | memoryview | npt.NDArray[np.uint8]
    media_type: str = ""
    text: str = ""

    def encoded(self) -> AssetData:
        """A copy of it as an asset. Raises InvalidAsset, WrongDtype or WrongShape."""
        if isinstance(self.data, np.ndarray):
            return _encoded_pixels(self.data, self.media_type)
        if not self.media_type.startswith("image/") or not self.media_type.isprintable():
            raise InvalidAsset(
                f"An image of bytes has the media type {self.media_type[:80]!r}.",
                hint="Say how it is encoded, as in media_type='image/png', or give an array of pixels.",
            )
        if not isinstance(self.data, bytes | bytearray | memoryview) or not len(self.data):
            raise InvalidAsset(
                f"The data of an image is {_short(self.data)}.", hint="Give bytes that are not empty, or a u1 array."
            )
        return make_asset(bytes(self.data), self.media_type)

    def __eq__(self, other: object) -> bool:
        """Whether both show the same now, with the same text."""
        return isinstance(other, Image) and (self.encoded(), self.text) == (other.encoded(), other.text)

    __hash__ = None  # type: ignore[assignment]  # its content may change


def make_asset(data: bytes, media_type: str) -> AssetData:
    """These bytes as an asset."""
    return AssetData(hashlib.sha256(data).hexdigest(), media_type, data)


def is_asset_name(name: str) -> bool:
    """Whether it reads as the name of an asset."""
    return _NAME.fullmatch(name) is not None


def check_asset(name: str, data: bytes | bytearray | memoryview) -> None:
    """Raises CorruptAsset unless these are the bytes of that name."""
    found = hashlib.sha256(data).hexdigest()
    if found != name:
        raise corrupt_asset(name, f"its {len(data)} bytes have the SHA-256 {found}")


def encode_array(array: npt.NDArray[Any]) -> AssetData:
    """An array of numbers as an asset, copied. Raises WrongDtype."""
    if array.dtype.kind not in _NUMBERS:
        raise WrongDtype(
            f"An array of {array.dtype} is no asset.", hint="Assets hold booleans, integers and floats, never objects."
        )
    flat = np.ascontiguousarray(array).reshape(array.shape)
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(flat))
    return make_asset(head.getvalue() + flat.tobytes(), ARRAY_MEDIA_TYPE)


def decode_array(data: bytes | bytearray | memoryview) -> npt.NDArray[Any]:
    """The array of such an asset, as a read-only view of the bytes. Raises InvalidAsset if they are none."""
    view = memoryview(data).toreadonly()
    head = _NPY_HEAD.match(view[:_MAX_HEADER])
    if head is None or head.end() != 10 + int.from_bytes(head["length"], "little"):
        raise _no_array("it does not begin as an .npy file of numbers does")
    shape = tuple(int(size) for size in head["shape"].replace(b",", b" ").split())
    try:
        dtype = np.dtype(head["dtype"].decode())
    except TypeError as error:
        raise _no_array(f"{error}") from error
    there, needed = len(view) - head.end(), math.prod(shape) * dtype.itemsize
    if there != needed or len(shape) > _MAX_DIMENSIONS:
        raise _no_array(f"an array {dtype}{list(shape)} takes {needed} bytes, there are {there}")
    return np.ndarray(shape, dtype, view, head.end())


def pack_assets(found: Sequence[bytes | HeadraceError]) -> bytes:
    """Several assets as one body, see ``wire.AssetHead``."""
    heads: list[messages.AssetHead] = []
    parts: list[bytes] = []
    for item in found:
        if isinstance(item, HeadraceError):
            heads.append(messages.AssetHead(problem=item.problem()))
        else:
            heads.append(messages.AssetHead(size_bytes=len(item)))
            parts += [item, bytes(-len(item) % ALIGNMENT)]
    text = msgspec.json.encode(heads)
    return b"".join([_LENGTH.pack(len(text)), text, bytes(-(_LENGTH.size + len(text)) % ALIGNMENT), *parts])


def unpack_assets(body: bytes | memoryview) -> list[memoryview | HeadraceError]:
    """The assets of such a body, or the errors in their place; views of it. Raises InvalidRequest if it is none."""
    view = memoryview(body).toreadonly()
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(view)[0]
        heads = msgspec.json.decode(view[_LENGTH.size : end], type=list[messages.AssetHead])
    except (struct.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The bytes are no assets: {error}.", hint="Is there a proxy in between?") from error
    found: list[memoryview | HeadraceError] = []
    start = padded(end)
    for head in heads:
        if head.problem is not None:
            found.append(from_problem(head.problem))
            continue
        if head.size_bytes < 0 or start + head.size_bytes > len(view):
            raise InvalidRequest("The bytes are no assets: they end too early.", hint="They were cut on the way.")
        found.append(view[start : start + head.size_bytes])
        start += padded(head.size_bytes)
    return found


def asset_path(folder: Path, name: str) -> Path:
    """Where an asset is stored below the folder of all assets."""
    return folder / name[:2] / name


def read_asset(folder: Path, name: str) -> bytes:
    """A stored asset, checked against its name. Raises UnknownAsset, CorruptAsset."""
    if not is_asset_name(name):
        raise unknown_asset(name)
    try:
        data = asset_path(folder, name).read_bytes()
    except FileNotFoundError:
        raise unknown_asset(name) from None
    except OSError as error:
        raise corrupt_asset(name, f"its file cannot be read: {error.strerror}") from error
    check_asset(name, data)
    return data


def verify_asset(folder: Path, name: str) -> int:
    """Check a stored asset without holding it in memory; gives its size in bytes. Raises UnknownAsset, CorruptAsset."""
    digest, size = hashlib.sha256(), 0
    try:
        with open(asset_path(folder, name), "rb") as stream:
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
        f"There is no asset {name[:80]!r}.",
        hint="Assets are named by the SHA-256 of their bytes, and are kept as long as a stored trajectory refers to "
        "them.",
        asset=name[:80],
    )


def corrupt_asset(name: str, problem: str) -> CorruptAsset:
    return CorruptAsset(
        f"The asset {name} is damaged: {problem}.",
        hint="Only this asset is lost. `headrace fsck` lists all damage.",
        asset=name,
    )


def _encoded_pixels(pixels: npt.NDArray[Any], media_type: str) -> AssetData:
    if media_type:
        raise InvalidAsset(
            f"An image of pixels has the media type {media_type[:80]!r}.", hint="Leave it out: an array has its own."
        )
    if pixels.dtype != np.uint8:
        raise WrongDtype(f"An image is {pixels.dtype}, not uint8.", hint="Values are never converted silently.")
    if pixels.ndim not in (2, 3) or not pixels.size or (pixels.ndim == 3 and pixels.shape[2] not in _CHANNELS):
        raise WrongShape(
            f"An image has the shape {pixels.shape}.", hint="Give [height, width] or [height, width, 1, 3 or 4]."
        )
    return encode_array(pixels)


def _no_array(problem: str) -> HeadraceError:
    return InvalidAsset(
        f"The asset is no array: {problem}.", hint=f"Arrays have the media type {ARRAY_MEDIA_TYPE}; is it an image?"
    )


def _short(data: object) -> str:
    return "empty" if isinstance(data, bytes | bytearray | memoryview) else type(data).__name__
