"""Real file systems on recorded block devices: every crash of a run is mounted, opened and checked."""
