"""Backups of a data directory, and putting one back."""
