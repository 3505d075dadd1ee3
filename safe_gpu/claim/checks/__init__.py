"""Checks of a claim that holds its GPUs."""
