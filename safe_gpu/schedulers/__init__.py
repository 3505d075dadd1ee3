"""Batch schedulers and launchers: which job and which rank this process is, according to its environment.

Each scheduler is a class that names its variables, and turns an environment into a :class:`JobContext`, or into None
outside its jobs. Only functions of :mod:`.gpu_count` ask a scheduler. Nothing here depends on GPUs or claims.
"""
