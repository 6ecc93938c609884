"""The projection: the data of listings and lookups in SQLite, derived from the log."""
