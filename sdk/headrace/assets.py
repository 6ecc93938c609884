"""Assets: images and other large arrays that belong to a trajectory, named by their content.

* The name of an asset is the SHA-256 of its bytes, in lower-case hexadecimal: equal bytes have one name.
* Bytes that do not match their name raise ``CorruptAsset``.
* An array is encoded as an ``.npy`` file, which states its dtype and shape, and decodes to a read-only view.
* Only arrays of numbers are assets, so that nothing is unpickled.

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
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.errors import (
    CorruptAsset,
    HeadraceError,
    InvalidAsset,
    WrongDtype,
    WrongShape,
)
from headrace.trajectory import Asset

ARRAY_MEDIA_TYPE = "application/x-npy"
"""Media type of an array, including an image given as an array of pixels."""

_NAME = re.compile(r"[0-9a-f]{64}")
_NUMBERS = "biuf"
_NPY_HEAD = re.compile(
    rb"\x93NUMPY\x01\x00(?P<length>..)"
    rb"\{'descr': '(?P<dtype>[<>|][biuf]\d{1,2})', 'fortran_order': False, "
    rb"'shape': \((?P<shape>|\d{1,18},|\d{1,18}(?:, \d{1,18})+)\), \} *\n",
    re.DOTALL,
)
"""Header of an array in C order. It is matched here because numpy's own reader evaluates it."""
_MAX_HEADER = 1024
"""Bytes of an ``.npy`` header; about 128 in practice."""
_MAX_DIMENSIONS = 32
_CHANNELS = (1, 3, 4)


class AssetData(NamedTuple):
    """The name, media type and bytes of an asset."""

    name: str
    media_type: str
    data: bytes

    @property
    def entry(self) -> Asset:
        """The entry for it in ``Trajectory.assets``."""
        return Asset(name=self.name, media_type=self.media_type, size_bytes=len(self.data))


@dataclass(frozen=True, eq=False, kw_only=True)
class Image:
    """An image in an observation.

    ``data``: an encoded image with its ``media_type``, such as ``"image/png"``; or a u1 array ``[height, width]`` or
    ``[height, width, channels]`` with 1, 3 or 4 channels, which is stored as it is. It is copied when it is observed,
    so that the same buffer may be shown again with other content. ``text`` stands for the image where the policy reads
    text only; without it, such a policy cannot play the episode.
    """

    data: bytes | bytearray | memoryview | npt.NDArray[np.uint8]
    media_type: str = ""
    text: str = ""

    def encoded(self) -> AssetData:
        """Copy the image into an asset. Raises InvalidAsset, WrongDtype or WrongShape."""
        if isinstance(self.data, np.ndarray):
            return _encoded_pixels(self.data, self.media_type)
        if not self.media_type.startswith("image/") or not self.media_type.isprintable():
            raise InvalidAsset(
                f"An image given as bytes has the media type {self.media_type[:80]!r}.",
                hint="State its encoding, as in media_type='image/png', or give an array of pixels.",
            )
        if not isinstance(self.data, bytes | bytearray | memoryview) or not len(self.data):
            raise InvalidAsset(
                f"The data of an image is {_short(self.data)}.", hint="Give bytes that are not empty, or a u1 array."
            )
        return make_asset(bytes(self.data), self.media_type)

    def __eq__(self, other: object) -> bool:
        """True if both have the same content and text now."""
        return isinstance(other, Image) and (self.encoded(), self.text) == (other.encoded(), other.text)

    __hash__ = None  # type: ignore[assignment]  # the content may change


def make_asset(data: bytes, media_type: str) -> AssetData:
    """The asset with these bytes."""
    return AssetData(hashlib.sha256(data).hexdigest(), media_type, data)


def is_asset_name(name: str) -> bool:
    """True for 64 lower-case hexadecimal digits, the form of an asset name."""
    return _NAME.fullmatch(name) is not None


def check_asset(name: str, data: bytes | bytearray | memoryview) -> None:
    """Raise CorruptAsset unless the bytes match the name."""
    digest = hashlib.sha256(data).hexdigest()
    if digest != name:
        raise corrupt_asset(name, f"its {len(data)} bytes have the SHA-256 {digest}")


def encode_array(array: npt.NDArray[Any]) -> AssetData:
    """Encode an array of numbers, of any shape, as an asset; copies it. Raises WrongDtype for another dtype."""
    if array.dtype.kind not in _NUMBERS:
        raise WrongDtype(
            f"An array of {array.dtype} cannot be an asset.",
            hint="Assets hold booleans, integers and floats, never objects.",
        )
    flat = np.ascontiguousarray(array).reshape(array.shape)
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(flat))
    return make_asset(head.getvalue() + flat.tobytes(), ARRAY_MEDIA_TYPE)


def decode_array(data: bytes | bytearray | memoryview) -> npt.NDArray[Any]:
    """The array in an asset, as a read-only view of its bytes. Raises InvalidAsset."""
    view = memoryview(data).toreadonly()
    head = _NPY_HEAD.match(view[:_MAX_HEADER])
    if head is None or head.end() != 10 + int.from_bytes(head["length"], "little"):
        raise _invalid_array("it does not begin with the header of an .npy file of numbers")
    shape = tuple(int(size) for size in head["shape"].replace(b",", b" ").split())
    try:
        dtype = np.dtype(head["dtype"].decode())
    except TypeError as error:
        raise _invalid_array(f"{error}") from error
    available, needed = len(view) - head.end(), math.prod(shape) * dtype.itemsize
    if available != needed or len(shape) > _MAX_DIMENSIONS:
        raise _invalid_array(f"an array {dtype}{list(shape)} takes {needed} bytes, not {available}")
    return np.ndarray(shape, dtype, view, head.end())


def corrupt_asset(name: str, problem: str) -> CorruptAsset:
    return CorruptAsset(
        f"The asset {name} is damaged: {problem}.",
        hint="Only this asset is lost. `headrace fsck` lists all damage.",
        asset=name,
    )


def _encoded_pixels(pixels: npt.NDArray[Any], media_type: str) -> AssetData:
    if media_type:
        raise InvalidAsset(
            f"An image given as pixels has the media type {media_type[:80]!r}.",
            hint="Omit it: arrays have a media type of their own.",
        )
    if pixels.dtype != np.uint8:
        raise WrongDtype(
            f"The pixels are {pixels.dtype}, not uint8.", hint="Convert them; values are never converted silently."
        )
    if pixels.ndim not in (2, 3) or not pixels.size or (pixels.ndim == 3 and pixels.shape[2] not in _CHANNELS):
        raise WrongShape(
            f"The pixels have shape {pixels.shape}.", hint="Give [height, width] or [height, width, 1, 3 or 4]."
        )
    return encode_array(pixels)


def _invalid_array(problem: str) -> HeadraceError:
    return InvalidAsset(
        f"The asset is not an array: {problem}.", hint=f"Arrays have the media type {ARRAY_MEDIA_TYPE}; is it an image?"
    )


def _short(data: object) -> str:
    return "empty" if isinstance(data, bytes | bytearray | memoryview) else type(data).__name__
