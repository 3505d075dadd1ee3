"""The topology of a host: CPUs, NUMA nodes, sockets, caches and GPUs."""
