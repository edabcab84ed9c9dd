"""Carries out what the planner decided: runs moves in workers' threads, and settles them."""
