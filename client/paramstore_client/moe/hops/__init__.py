"""Exchanges that know which ranks share a node: what they send where, and when they are taken in place of the flat one."""
