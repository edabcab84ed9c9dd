"""Quantized experts: how they lie in a record, and how the tensors that a kernel computes with are made of them."""
