"""HTTP: one table of routes that drives dispatch, auth and OpenAPI."""
