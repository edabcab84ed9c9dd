"""Which slots go first. Pure objects, one per arena; they never see a slot's bytes, a lease or a clock."""
