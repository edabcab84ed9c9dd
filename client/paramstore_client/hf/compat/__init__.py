"""What of transformers works with stored experts: every name of it that is relied on, and what is refused."""
