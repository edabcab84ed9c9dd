"""Expert-parallel layers over the store: the ranks of a job compute each their own experts, and tokens travel."""

from paramstore_client.moe.expert_parallel import ExpertParallel

__all__ = ["ExpertParallel"]
