"""The demo: a byte-level MoE is trained out of a store that is an eighth of its state, killed, resumed and served.

`story` tells the seven steps; everything else is one actor of it. Nothing here is needed by the service.
"""
