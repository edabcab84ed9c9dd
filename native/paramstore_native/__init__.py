"""Calls into C libraries, bound at run time through cffi's ABI mode: no compiler, no headers, and a clear
reason where one is missing.
"""
