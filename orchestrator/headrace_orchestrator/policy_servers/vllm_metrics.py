"""The reader of vLLM's metrics as one ``Load``.

* The engines of a server count together; of the KV cache the fullest counts.
* A server without vLLM's gauges has no load; other metrics are skipped.
* A line of these that cannot be read raises ``ValueError``.
"""

from __future__ import annotations

from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

from headrace_orchestrator.policy_servers.admission import Load

_GAUGES = frozenset({"vllm:num_requests_running", "vllm:num_requests_waiting"})

_SUMMED = _GAUGES | {"vllm:num_preemptions_total", "vllm:generation_tokens_total", "vllm:request_success_total"}

_KV_CACHE = "vllm:kv_cache_usage_perc"

_ADAPTERS, _MAX_ADAPTERS = "vllm:lora_requests_info", "max_lora"

_NAMES = (*sorted(_SUMMED), _KV_CACHE, _ADAPTERS)


def read_load(text: str) -> Load | None:
    """Read a server's load; None if it has none of the gauges."""
    found: defaultdict[str, float] = defaultdict(float)
    # A server has a thousand lines more than these, and to parse them takes tens of milliseconds.
    lines = [line for line in text.splitlines(keepends=True) if line.startswith(_NAMES)]
    for family in text_string_to_metric_families("".join(lines)):
        for sample in family.samples:
            if sample.name in _SUMMED:
                found[sample.name] += sample.value
            elif sample.name == _KV_CACHE:
                found[_KV_CACHE] = max(found[_KV_CACHE], sample.value)
            elif sample.name == _ADAPTERS:
                found[_MAX_ADAPTERS] = float(sample.labels.get(_MAX_ADAPTERS, 0))
    if not _GAUGES & found.keys():
        return None
    return Load(
        running=found["vllm:num_requests_running"],
        waiting=found["vllm:num_requests_waiting"],
        kv_cache_used=found[_KV_CACHE],
        completed=found["vllm:request_success_total"],
        preemptions=found["vllm:num_preemptions_total"],
        tokens=found["vllm:generation_tokens_total"],
        max_adapters=int(found[_MAX_ADAPTERS]),
    )
