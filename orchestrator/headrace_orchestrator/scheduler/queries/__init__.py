"""Questions that the scheduler answers without changing anything."""
