"""What the history of a host tells."""
