"""How many steps of a namespace stay, unless set otherwise, and at most: for settings, and for help that loads none."""

from __future__ import annotations

RETAINED_STEPS = 2
"""Newest committed steps that stay readable, unless set otherwise; fewer would leave none while the next is published."""
HELD_STEPS = 0
"""Older steps of readers for which room is reserved beyond the retained ones, unless set otherwise. More of them borrow room."""
STEPS_MAX = 16
"""The most retained steps, and the most held steps: note slots on the volumes are few."""
