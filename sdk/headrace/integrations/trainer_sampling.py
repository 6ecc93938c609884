"""Checks that a trainer and a run mean the same sampling distribution.

* Logprobs before temperature or a filter are refused where sampling used one: a trainer compares them with those after.
* A sampling parameter that a trainer requests and the run does not use is refused, since a run samples by its spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.batch.batch import Row
from headrace.errors import InvalidRequest

NEUTRAL: dict[str, tuple[float | None, ...]] = {
    "top_k": (None, -1, 0),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
}
"""The accepted values of parameters that no run has: those that change nothing."""


def require_sampled_logprobs(row: Row) -> None:
    """Raise InvalidRequest if the logprobs of a row are not those of the distribution that was sampled."""
    sampling = row.segment.sampling
    if sampling.logprobs == "raw" and (sampling.temperature != 1 or sampling.top_p != 1):
        raise InvalidRequest(
            f"Row {row.index} was sampled at temperature {sampling.temperature:g} and top_p {sampling.top_p:g}, and "
            "its logprobs are those before both; the trainer would take them for those of the sampled distribution.",
            hint="Sample at temperature 1 and top_p 1, or let the servers report processed logprobs (policy.logprobs) "
            "and set the run's temperature in the trainer.",
        )


def require_run_sampling(trainer: str, requested: Mapping[str, Any], run: str, used: Mapping[str, Any]) -> None:
    """Raise InvalidRequest if the trainer requests another distribution than the run's. ``used``: ``sampling`` of the
    run's spec. A parameter that is None or missing is not requested."""
    for name in ("temperature", "top_p"):
        value = requested.get(name)
        if value is not None and value != used.get(name, 1.0):
            raise InvalidRequest(
                f"{trainer} requests {name} {value:g}, but run {run!r} samples at {used.get(name, 1.0):g}.",
                hint="Set both to the same value. For an evaluation at another temperature use Client.evaluate.",
            )
    for name, neutral in NEUTRAL.items():
        value = requested.get(name)
        if value not in neutral:
            raise InvalidRequest(
                f"{trainer} requests {name} {value}, but a run samples without it.",
                hint="Remove it from the trainer's configuration.",
            )
