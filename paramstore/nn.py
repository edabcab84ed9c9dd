"""Gives `paramstore_client.nn`, the torch modules of the client, the name `paramstore.nn`."""

from paramstore_client.nn import *  # noqa: F403
