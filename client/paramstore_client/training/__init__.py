"""What joins a model's stored experts with a training loop: needs torch alone."""
