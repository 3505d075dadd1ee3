"""Claims across the hosts of an engine that users already run: Ray or Dragon.

On each host a process claims GPUs as any other process does. Nothing here schedules work: a claim returns options or
policies of the engine.
"""
