"""Hostile programs and their expected outcomes, for any runtime of the registry.

* A case is one function, numbered as in the docs; it says what it found, with the evidence.
* What is expected of each runtime is a table that was written before anything ran (``expected.toml``).
* A case that would harm this machine is not run where nothing isolates.
"""
