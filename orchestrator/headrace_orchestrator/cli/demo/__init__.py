"""``headrace demo``: a whole run on this machine, its control, and what came of both."""
