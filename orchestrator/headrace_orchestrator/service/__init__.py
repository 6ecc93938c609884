"""The service: scheduler core, log and projection behind one set of commands."""

from headrace_orchestrator.service.service import Service

__all__ = ["Service"]
