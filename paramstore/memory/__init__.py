"""Memory that the service hands out: sealed memfds where clients see it, private huge pages where they do not."""
