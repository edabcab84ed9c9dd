"""What a writer hands in: the upload area, the gradients that are pending in it, and the ranges that requests consume."""
