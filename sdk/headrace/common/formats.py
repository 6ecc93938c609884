"""Versions of the formats that cross process boundaries."""

from __future__ import annotations

SCHEMA = 1
"""Version of the wire schema of trajectories."""
