"""Built-in environments. Their ids are entry points of the distribution, listed in pyproject.toml.

* The entry points name factories as text, so no environment is imported before it is first made.
"""
