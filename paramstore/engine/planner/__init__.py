"""Every decision about residency, on one thread and without I/O; the only writer of the tables."""
