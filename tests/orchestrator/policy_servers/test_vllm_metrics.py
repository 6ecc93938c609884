"""The load of a server, read from vLLM's metrics."""

from __future__ import annotations

import pytest

from headrace_orchestrator.policy_servers.admission import Load
from headrace_orchestrator.policy_servers.vllm_metrics import read_load

TWO_ENGINES = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 12.0
vllm:num_requests_running{engine="1",model_name="tiny"} 10.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0
# HELP vllm:num_requests_waiting_by_reason Number of waiting requests by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 3.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.75
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="tiny"} 2.0
# HELP vllm:num_preemptions_created Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="tiny"} 1.7958168e+09
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="tiny"} 4096.0
# HELP vllm:request_success_total Count of successfully processed requests.
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 40.0
vllm:request_success_total{engine="1",finished_reason="length",model_name="tiny"} 2.0
# HELP vllm:lora_requests_info Running stats on lora requests.
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="2",running_lora_adapters="a",waiting_lora_adapters=""} 1.7958168e+09
"""


def test_the_load_is_the_sum_over_the_engines_with_the_kv_cache_of_the_fullest():
    assert read_load(TWO_ENGINES) == Load(
        running=22, waiting=3, kv_cache_used=0.75, completed=42, preemptions=2, tokens=4096, max_adapters=2
    )


def test_a_server_without_vllms_gauges_has_no_load():
    assert read_load("# TYPE up gauge\nup 1.0\n") is None
    assert read_load("<html>Not here</html>") is None


def test_an_unreadable_line_raises():
    with pytest.raises(ValueError, match=r"."):
        read_load("vllm:num_requests_running{engine=")
