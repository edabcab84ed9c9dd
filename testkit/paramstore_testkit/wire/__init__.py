"""Both ends of the protocol, for tests of the other: a client of single frames, broken frames, and a daemon in a thread."""
