"""Transitions: one function for each event, the only code that changes the scheduler's durable state."""
