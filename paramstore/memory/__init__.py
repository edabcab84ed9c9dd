"""Memory the service hands out: sealed memfds for what clients see, private huge pages for what they do
not."""
