"""Finds into how many parts a layer is split, and what is kept of them: a model of what was measured, and the clock after it."""
