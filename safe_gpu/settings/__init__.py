"""What users and administrators set."""
