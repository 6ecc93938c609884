"""Assets on disk: images and large arrays of trajectories."""
