"""The search for GPUs: attempt, decide, wait, attempt again."""
