"""The sandbox pool of a host: fair queues, leases, warm sandboxes and resets."""
