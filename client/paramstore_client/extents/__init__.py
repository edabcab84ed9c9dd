"""Records read from leased extents, past the daemon's memory, and proven where they land."""
