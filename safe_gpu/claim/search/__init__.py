"""The search for GPUs: look, decide, wait, look again."""
