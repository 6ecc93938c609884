"""Tests of renderers."""
