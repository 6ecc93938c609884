"""``headrace demo``: a whole run on this machine beside its control, with the results of both."""
