"""Claims: how a process gets its GPUs, holds them and releases them.

``selection`` decides which GPUs are free. ``coordination`` has the entries, the doors and the queue. The way of a claim
through the files stands on one screen in CONTRIBUTING.
"""
