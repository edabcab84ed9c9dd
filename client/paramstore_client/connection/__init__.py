"""One session with one daemon: how it is found or started, its socket, the memory it lends, and the tickets of what was asked."""
