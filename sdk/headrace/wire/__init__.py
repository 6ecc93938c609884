"""The formats that cross process boundaries: control messages, trajectories, policy-server calls."""
