"""The commands about this host."""
