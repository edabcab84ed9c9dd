"""Work that no session asked for, beside all that sessions ask: the patrol, and the scrubs that it runs."""
