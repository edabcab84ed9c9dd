"""Checkpoints as files: their tensors, which of them make which expert, and the names that the hub knows."""
