"""Experts in device memory: a cache in front of a namespace, and a ring of slots that layers take in turn."""
