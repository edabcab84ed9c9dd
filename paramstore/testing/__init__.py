"""Fakes of the outside world, shipped: volumes, catalog, clock, workers. They pass the same contract tests as the real ones."""
