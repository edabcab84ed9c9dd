"""The demo: a byte-level MoE is trained out of a store that is an eighth of its state, killed, resumed and served.

`acts` tells the demo's seven steps; each of the other modules plays one part in it. Nothing here is needed by the service.
"""
