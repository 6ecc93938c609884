"""The one way in which events change the scheduler's state: a transition for each event."""
