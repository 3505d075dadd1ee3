"""What commands do on other hosts, by the ssh of the system."""
