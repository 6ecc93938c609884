"""Fleets: what starts workers and keeps them running. ``local`` is child processes of this machine."""
