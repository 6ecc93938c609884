"""Images of a prompt: their encoding for a policy server, and the check of the prompt that the engine saw.

* An encoded image is sent as it is stored; an array of pixels is sent as a PNG, which is lossless.
* A prompt is sent with one token for each image. The engine's prompt may have more tokens for the images, but no other
  difference.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.assets import ARRAY_MEDIA_TYPE, AssetData, decode_array
from headrace.errors import PolicyFailure
from headrace_workers.policies.base import SeenPrompt

PNG_COLOURS = {1: 0, 3: 2, 4: 6}
"""PNG's colour type by number of channels: grey, RGB, RGBA."""

NO_FILTER = b"\0"
"""PNG's filter type of an unfiltered row."""


def data_url(image: AssetData) -> str:
    """Encode the image as a ``data:`` URL."""
    media_type, data = image.media_type, image.data
    if media_type == ARRAY_MEDIA_TYPE:
        media_type, data = "image/png", png(decode_array(data))
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encode pixels u1[height, width] or u1[height, width, channels] as a PNG."""
    height, width = pixels.shape[:2]
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    rows = b"".join(NO_FILTER + row.tobytes() for row in np.ascontiguousarray(pixels))
    header = struct.pack(">IIBBBBB", width, height, 8, PNG_COLOURS[channels], 0, 0, 0)
    chunks = (_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(rows, 1)), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def seen_prompt(
    sent: Sequence[int], count: int, token_ids: Sequence[int] | None, images: Sequence[tuple[int, int]] | None
) -> SeenPrompt:
    """The prompt with ``count`` images as the engine saw it. Raises PolicyFailure ``placeholders-missing``,
    ``images-changed`` or ``prompt-changed``."""
    if token_ids is None or images is None:
        raise PolicyFailure(
            "The answer does not report which tokens of the prompt are images.",
            hint="The server must answer with `prompt_token_ids` and `mm_placeholders`, as vLLM's generate route does.",
            kind="placeholders-missing",
            retryable=False,
        )
    if len(images) != count:
        raise PolicyFailure(
            f"{count} images were sent, but the engine reports {len(images)}.", kind="images-changed", retryable=False
        )
    collapsed: list[int] = []
    last = 0
    for start, end in images:
        collapsed += token_ids[last:start]
        collapsed += sent[len(collapsed) : len(collapsed) + 1]
        last = end
    collapsed += token_ids[last:]
    if collapsed != list(sent):
        raise PolicyFailure(
            f"The engine's prompt of {len(token_ids)} tokens differs from the sent one in more than its image tokens.",
            kind="prompt-changed",
            retryable=False,
        )
    return SeenPrompt(list(token_ids), list(images))
