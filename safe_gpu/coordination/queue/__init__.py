"""The queue: first come, first served, without a daemon."""
