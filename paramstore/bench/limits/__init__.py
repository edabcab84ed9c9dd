"""The limits that the service stands beside, each without it: the disk, a socket, torch's own step, and the memory they work in."""
