"""The console: a page that shows whether the learner waits, and on what."""
