"""What the host's kernel reports: processes, programs and files of others."""
