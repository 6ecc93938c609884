"""The console: one page that answers whether the learner waits, and on what."""
