"""A tiny policy that learns on a CPU, speaks vLLM's completions protocol, and injects faults on request.

It is the policy of the demo and of the examples, and the test double for a policy server.
"""
