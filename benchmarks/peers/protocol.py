"""Payload of all peers, and the protocol of their measurements.

* A trajectory is 4,096 token ids i32, logprobs f32 and sampled flags u8, with 280 bytes of metadata: 37 KB.
* A request is a line of JSON on stdin, ``{"do": name, ...}``; an answer is a line on stdout that starts with ``>``.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping

import numpy as np

TOKENS, METADATA_BYTES = 4096, 280

ANSWER = ">"


def columns(count: int) -> dict[str, np.ndarray]:
    """Make the payload of ``count`` trajectories, by field, with numbers like those of Headrace's records."""
    generator = np.random.default_rng(0)
    sampled = np.tile(np.repeat(np.array([0, 1], np.uint8), 256), (count, TOKENS // 512))
    return {
        "token_ids": generator.integers(0, 32_000, (count, TOKENS)).astype(np.int32),
        "logprobs": np.where(sampled == 1, -generator.random((count, TOKENS)), 0).astype(np.float32),
        "sampled": sampled,
        "metadata": generator.integers(0, 255, (count, METADATA_BYTES)).astype(np.uint8),
    }


def serve(actions: Mapping[str, Callable[..., dict[str, float]]]) -> None:
    """Answer requests until stdin ends."""
    _answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            _answer(actions[request.pop("do")](**request))
        except Exception as error:  # noqa: BLE001 - whatever a peer raises goes into the table
            traceback.print_exc()
            _answer({"error": f"{type(error).__name__}: {error}"})


def _answer(value: Mapping[str, object]) -> None:
    sys.stdout.write(f"{ANSWER}{json.dumps(value)}\n")
    sys.stdout.flush()
