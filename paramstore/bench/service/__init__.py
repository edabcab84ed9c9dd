"""The service under measurement: its daemon, the experts that fill it, a client that keeps it busy, its memory."""
