"""A model of transformers whose experts are stored: where they are in it, and how its layers compute with them."""
