"""Messages and frames between client and daemon. Values only: no socket, no event loop."""
