"""`import paramstore.hf`: transformers models with stored experts, `paramstore_client.hf`."""

from paramstore_client.hf import *  # noqa: F403
