"""A policy inside the worker's own process, for benchmarks and tests.

* The object's ``sample`` may be a plain function or a coroutine function.
* A worker that is started with one uses it for every endpoint.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from headrace.common.timeouts import timeout
from headrace.errors import EpisodeFailure, PolicyFailure, SetupError
from headrace_workers.policies.base import AnyProtocol, Policy, Sample, SampleRequest, ScoreRequest, check_sample


class InProcessSampler(Protocol):
    """The object that a ``module:factory`` returns."""

    def sample(self, request: SampleRequest) -> Sample | Awaitable[Sample]:
        """Sample one turn; same contract as ``Policy.sample``."""
        ...


class InProcessPolicy:
    """An in-process object as the policy of every endpoint."""

    def __init__(self, sampler: InProcessSampler) -> None:
        self._sampler = sampler

    def at(self, endpoints: Sequence[str], *, run: str = "", protocol: AnyProtocol = "auto") -> Policy:
        return self

    async def sample(self, request: SampleRequest) -> Sample:
        sample = await self._sample(request)
        if sample.text is None or not request.accepts_text:
            check_sample(sample, request.vocab_size, request.max_tokens)
        return sample

    async def _sample(self, request: SampleRequest) -> Sample:
        try:
            result = self._sampler.sample(request)
            if isinstance(result, Sample):
                return result
            if not inspect.isawaitable(result):
                raise PolicyFailure(
                    f"The in-process policy returned {type(result).__name__}, not a Sample.",
                    kind="unreadable-response",
                    retryable=False,
                )
            async with timeout(request.timeout_s):
                return await result
        except TimeoutError as error:
            raise PolicyFailure(
                f"The in-process policy did not answer within {request.timeout_s:g} s.", kind="timeout", retryable=True
            ) from error
        except EpisodeFailure:
            raise
        except Exception as error:
            raise PolicyFailure(
                f"The in-process policy raised {type(error).__name__}: {error}", kind="raised", retryable=True
            ) from error

    async def score(self, endpoints: Sequence[str], request: ScoreRequest) -> npt.NDArray[np.float32]:
        raise PolicyFailure(
            "An in-process policy cannot score tokens.",
            hint="Start the worker without --policy for runs that have scorers.",
            kind="no-scoring",
            retryable=False,
        )

    def stats(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        """Do nothing: an in-process policy opens no connection."""


def load_in_process_policy(path: str) -> InProcessPolicy:
    """Call ``module:factory`` without arguments. Raises SetupError if it does not exist or does not return a policy."""
    module, _, name = path.partition(":")
    try:
        factory = cast(Callable[[], Any], getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError, ValueError) as error:
        raise SetupError(
            f"The policy {path!r} cannot be loaded: {error}.",
            hint="Give it as module:factory, with the module importable where the worker runs.",
        ) from error
    sampler = factory()
    if not callable(getattr(sampler, "sample", None)):
        raise SetupError(f"The policy {path!r} returned {type(sampler).__name__}, which has no sample method.")
    return InProcessPolicy(sampler)
