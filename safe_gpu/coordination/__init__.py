"""The state directory and what stands in it, as PROTOCOL.md beside this file describes it.

Nothing here asks a driver or decides which GPUs are free.
"""
