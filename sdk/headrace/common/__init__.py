"""Utilities shared by all packages of the project; not part of the public interface."""
