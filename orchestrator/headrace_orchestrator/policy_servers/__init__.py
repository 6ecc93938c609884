"""The policy servers of runs: watched, and brought to the weights that their learners announce."""
