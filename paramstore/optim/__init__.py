"""Arithmetic on records, on the host, in worker threads: the update, the cast to `param`, norms. Imports torch."""
