"""What joins a model's stored experts with a training loop: needs torch alone."""

from paramstore_client.training.binding import bind
from paramstore_client.training.experts import Experts
from paramstore_client.training.launch import Launch, launched
from paramstore_client.training.sentinel import ExpertSentinel

__all__ = ["ExpertSentinel", "Experts", "Launch", "bind", "launched"]
