"""Gives `paramstore_client.training`, which joins stored experts with a training loop, the name `paramstore.training`."""

from paramstore_client.training import *  # noqa: F403
