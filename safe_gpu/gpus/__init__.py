"""GPUs as the drivers report them."""
