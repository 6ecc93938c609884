"""Control groups of both versions, or none: they bound, count and end all processes of an execution together."""
