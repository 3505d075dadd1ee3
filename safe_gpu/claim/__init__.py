"""Claims: how a process gets its GPUs, holds them and releases them.

``selection`` decides which GPUs are free. ``coordination`` has the entries, the doors and the queue.
"""
