"""The projection: what listings and lookups need, in SQLite, derived from the log."""
