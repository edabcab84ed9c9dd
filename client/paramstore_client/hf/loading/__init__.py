"""How a model comes to be: from a checkpoint or a config, with the namespace that holds its experts."""
