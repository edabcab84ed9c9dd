"""Simulated disks, the machine that a whole store runs on in memory, and what a crash leaves of them."""
