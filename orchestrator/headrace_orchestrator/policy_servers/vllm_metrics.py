"""The load of a server, read from vLLM's metrics.

* The load is the sum over the server's engines; its KV cache is that of the fullest engine.
* A server without vLLM's gauges has no load; other metrics are skipped.
* An unreadable line of these metrics raises ``ValueError``.
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
    """Read a server's load; None if the text has none of the gauges."""
    totals: defaultdict[str, float] = defaultdict(float)
    # Parsing a server's other thousand lines would take tens of milliseconds.
    lines = [line for line in text.splitlines(keepends=True) if line.startswith(_NAMES)]
    for family in text_string_to_metric_families("".join(lines)):
        for sample in family.samples:
            if sample.name in _SUMMED:
                totals[sample.name] += sample.value
            elif sample.name == _KV_CACHE:
                totals[_KV_CACHE] = max(totals[_KV_CACHE], sample.value)
            elif sample.name == _ADAPTERS:
                totals[_MAX_ADAPTERS] = float(sample.labels.get(_MAX_ADAPTERS, 0))
    if not _GAUGES & totals.keys():
        return None
    return Load(
        running=totals["vllm:num_requests_running"],
        waiting=totals["vllm:num_requests_waiting"],
        kv_cache_used=totals[_KV_CACHE],
        completed=totals["vllm:request_success_total"],
        preemptions=totals["vllm:num_preemptions_total"],
        tokens=totals["vllm:generation_tokens_total"],
        max_adapters=int(totals[_MAX_ADAPTERS]),
    )
