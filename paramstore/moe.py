"""Gives `paramstore_client.moe`, expert-parallel layers, the name `paramstore.moe`."""

from paramstore_client.moe import *  # noqa: F403
