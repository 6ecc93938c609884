"""The tiny policy inside a worker's own process: ``--policy headrace_workers.tiny_policy.in_process:factory``.

* It answers exactly as the server does for the same seed and weights.
* Its weights are those of version 0.0; it is for measurements and tests, not for training.
"""

from __future__ import annotations

from headrace.errors import PolicyFailure, RequestError
from headrace_workers.policies.base import Sample, SampleRequest, one_version
from headrace_workers.tiny_policy.policy import TinyPolicy
from headrace_workers.tiny_policy.sampler import SamplerSettings


class LocalTinyPolicy:
    """Samples turns in process."""

    def __init__(self, policy: TinyPolicy) -> None:
        self.policy = policy

    def sample(self, request: SampleRequest) -> Sample:
        """Sample one turn. Raises PolicyFailure ``request-refused`` for a prompt outside the vocabulary."""
        sampling = SamplerSettings(
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            max_tokens=request.max_tokens,
            stop=request.stop,
            stop_token_ids=request.stop_token_ids,
        )
        try:
            generations, version = self.policy.generate(request.prompt, sampling, seed=request.sampling.seed)
        except RequestError as error:
            raise PolicyFailure(str(error), kind="request-refused", retryable=False) from error
        generation = generations[0]
        return Sample(
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            finish_reason=generation.finish_reason,
            versions=one_version(len(generation.token_ids), version),
        )


def factory() -> LocalTinyPolicy:
    """Make a policy with the weights of version 0.0."""
    return LocalTinyPolicy(TinyPolicy())
