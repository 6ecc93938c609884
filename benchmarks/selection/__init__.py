"""The cost and the fairness of selection, measured with the real scheduler on a virtual clock."""
