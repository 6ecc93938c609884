"""The console: a page that says whether the learner waits, and on what."""
