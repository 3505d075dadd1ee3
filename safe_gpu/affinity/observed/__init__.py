"""Where processes and their memory really are."""
