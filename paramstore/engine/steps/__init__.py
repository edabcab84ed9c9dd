"""The durable steps of a namespace: commits, their proof, history, initial values, transactions."""
