"""One run of a model that lies in a directory or the hub's cache: its plan, its store, the daemon of that, its answers, its
figures."""
