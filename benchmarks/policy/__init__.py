"""Benchmarks of policy serving: the client's cost, throughput of an engine, cost and exactness of weight updates."""
