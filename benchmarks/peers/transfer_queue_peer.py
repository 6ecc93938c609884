"""TransferQueue with its own client and its simple storage (RAM only) on Ray.

Runs in the virtual environment of ``benchmarks/peers/transfer_queue.txt``, and uses the protocol of ``protocol.py``.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time

os.environ |= {"TQ_LOGGING_LEVEL": "ERROR", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

import protocol
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

PARTITION = "p"

LOGICAL_CPUS = 16
"""Ray's slots for actors, not cores: with fewer, its storage units never start on a small machine."""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tq-", dir="/tmp") as folder:
        ray.init(
            num_cpus=LOGICAL_CPUS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=100 << 20,
            _temp_dir=folder,
        )
        tq.init({"backend": {"SimpleStorage": {"total_storage_size": 1 << 20}}})
        try:
            protocol.serve({"put": put, "get": get})
        finally:
            tq.close()
            ray.shutdown()


_numbers = itertools.count()


def batch(size: int) -> TensorDict:
    return TensorDict({name: torch.from_numpy(array) for name, array in protocol.columns(size).items()}, [size])


def keys(size: int) -> list[str]:
    return [f"{next(_numbers)}" for _ in range(size)]


def put(count: int, together: int) -> dict[str, float]:
    """Put ``count`` trajectories, ``together`` in each call, one call at a time."""
    content = batch(together)
    calls = [keys(together) for _ in range(count // together)]
    tags = [{"step": 0} for _ in range(together)]
    started_at, cpu_before_s = time.perf_counter(), time.process_time()
    for names in calls:
        tq.kv_batch_put(names, PARTITION, content, tags)
    cost = {"wall_s": time.perf_counter() - started_at, "cpu_s": time.process_time() - cpu_before_s}
    for names in calls:
        tq.kv_clear(names, PARTITION)
    return cost


def get(size: int) -> dict[str, float]:
    """Put ``size`` trajectories, get them in one call, and return the cost of the get."""
    names = keys(size)
    tq.kv_batch_put(names, PARTITION, batch(size), [{"step": 0} for _ in names])
    started_at, cpu_before_s = time.perf_counter(), time.process_time()
    result = tq.kv_batch_get(names, PARTITION)
    cost = {"wall_s": time.perf_counter() - started_at, "cpu_s": time.process_time() - cpu_before_s}
    assert len(result) == size
    tq.kv_clear(names, PARTITION)
    return cost


if __name__ == "__main__":
    sys.exit(main())
