"""Policies, which rank the victims of an arena. Pure objects, one per arena; they see no slot's bytes, no lease and no clock."""
