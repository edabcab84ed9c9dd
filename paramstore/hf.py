"""Gives `paramstore_client.hf`, transformers models with stored experts, the name `paramstore.hf`."""

from paramstore_client.hf import *  # noqa: F403
