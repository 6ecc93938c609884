"""Reverb with its own client: one writer, 64 items in flight, each confirmed by the server (RAM only).

Runs in the virtual environment of ``benchmarks/peers/reverb.txt``, and uses the protocol of ``protocol.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import protocol
import reverb

IN_FLIGHT = 64
PORT_LINE = "port "
_SERVER = """
import sys, reverb
fifo = reverb.selectors.Fifo
table = reverb.Table("t", fifo(), fifo(), 1 << 30, reverb.rate_limiters.MinSize(1))
server = reverb.Server([table])
print("port", server.port, flush=True)
sys.stdin.read()
"""


def main() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert server.stdin is not None
    assert server.stdout is not None
    while not (line := server.stdout.readline().decode()).startswith(PORT_LINE):
        assert line, "the server ended"
    client = reverb.Client(f"localhost:{line.removeprefix(PORT_LINE).strip()}")
    items = [{name: array[number] for name, array in protocol.columns(256).items()} for number in range(256)]

    def insert(count: int) -> dict[str, float]:
        with client.trajectory_writer(num_keep_alive_refs=1) as writer:
            started_at, cpu_before_s = time.perf_counter(), time.process_time()
            for number in range(count):
                writer.append(items[number % len(items)])
                writer.create_item("t", 1.0, {name: writer.history[name][-1:] for name in items[0]})
                writer.flush(block_until_num_items=IN_FLIGHT - 1)
            writer.flush()
            cost = {"wall_s": time.perf_counter() - started_at, "cpu_s": time.process_time() - cpu_before_s}
        assert client.server_info()["t"].current_size == count
        client.reset("t")
        return cost

    try:
        protocol.serve({"insert": insert})
    finally:
        server.stdin.close()
        server.wait(20)


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
