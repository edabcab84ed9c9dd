"""Data and lookups of the engine: what is where, who waits and who holds what. Nothing here decides."""
