"""Checks of the state directory, and of what stands in it."""
