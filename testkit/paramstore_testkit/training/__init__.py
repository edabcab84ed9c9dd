"""Small models with routed experts, those of transformers among them, stored and resident side by side."""
