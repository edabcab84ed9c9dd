"""A CUDA device that is none: streams that run in any order that is legal, and what device code gets wrong in one of them."""
