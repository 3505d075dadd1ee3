"""Which GPUs a request may have, and why not the others. Nothing here reads a file, a clock or a driver."""
