"""`import paramstore.nn`: the torch modules of the client, `paramstore_client.nn`."""

from paramstore_client.nn import *  # noqa: F403
