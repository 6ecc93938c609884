"""Formats that cross process boundaries: control messages, trajectory records, calls of policy servers."""
