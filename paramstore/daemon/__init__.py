"""The process around the store: sessions on a Unix socket, start and shutdown."""
