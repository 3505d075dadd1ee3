"""Plans of the CPUs of each GPU."""
