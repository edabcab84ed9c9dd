"""Joins a model's stored experts with a training loop; needs torch alone."""

from paramstore_client.training.binding import bind
from paramstore_client.training.experts import Experts
from paramstore_client.training.launch import Launch, launched
from paramstore_client.training.prefetch_plan import PrefetchPlan, plan_prefetch
from paramstore_client.training.sentinel import ExpertSentinel
from paramstore_client.training.timeline import Timeline

__all__ = ["ExpertSentinel", "Experts", "Launch", "PrefetchPlan", "Timeline", "bind", "launched", "plan_prefetch"]
