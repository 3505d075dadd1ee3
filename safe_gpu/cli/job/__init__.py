"""The commands that claim GPUs or wait for them."""
