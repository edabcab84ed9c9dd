"""`import paramstore.training`: what joins stored experts with a training loop, `paramstore_client.training`."""

from paramstore_client.training import *  # noqa: F403
