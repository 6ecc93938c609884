"""Adapters for trainers of other projects, and the worker extension for vLLM.

``headrace`` itself imports none of them, and they import no trainer: each adapter implements the interface that its
trainer expects.
"""
