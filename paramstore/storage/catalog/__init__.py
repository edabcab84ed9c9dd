"""The durable map from keys and steps to records: its rows, their bytes in LMDB, the rules of a namespace's steps."""
