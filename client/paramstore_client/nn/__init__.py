"""Torch modules over the store; needs torch alone."""

from paramstore_client.nn.resident_experts import ResidentExperts
from paramstore_client.nn.routing import ExpertFn, swiglu
from paramstore_client.nn.schedule import ExpertSchedule
from paramstore_client.nn.stored_experts import StoredExperts

__all__ = ["ExpertFn", "ExpertSchedule", "ResidentExperts", "StoredExperts", "swiglu"]
