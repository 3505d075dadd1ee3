"""Who holds what, by the kernel's word and by the records."""
