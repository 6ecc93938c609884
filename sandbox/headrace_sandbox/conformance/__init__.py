"""Hostile programs and their expected outcomes, for any runtime of the registry.

* A case is one function, numbered as in the docs; it returns an outcome, with the evidence.
* The expected outcomes on each runtime are in a table that was written before anything ran (``expected.toml``).
* A case that would harm this machine is not run where nothing isolates.
"""
