"""Bugs planted on purpose, which the tests must find."""
