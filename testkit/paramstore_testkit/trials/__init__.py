"""Random lives of a small store beside a model of what its calls mean: drivers, faults, and the damage that disks do."""
