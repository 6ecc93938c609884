"""Tests of bounded calls."""
