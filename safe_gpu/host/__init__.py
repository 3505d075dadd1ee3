"""What the host's kernel tells: processes, programs and files of others."""
