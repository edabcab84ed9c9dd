"""Arithmetic on records, on the host, in worker threads: updates, casts to `param`, norms. Imports torch."""
