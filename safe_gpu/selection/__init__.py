"""Which GPUs a request may have, and why not the others. Pure."""
