"""The test kit: what the project's tests, benches and `make soak` share. The wheel leaves it out."""
