"""How values are written for people."""
