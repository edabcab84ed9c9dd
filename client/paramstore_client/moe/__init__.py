"""Expert-parallel layers over the store: the ranks of a job compute each their own experts, and tokens travel."""

from paramstore.core.placement import Placement
from paramstore_client.moe.balance.tasks import TaskRows, split_tasks
from paramstore_client.moe.expert_parallel import ExpertParallel
from paramstore_client.moe.pipeline_plan import Pipeline

__all__ = ["ExpertParallel", "Pipeline", "Placement", "TaskRows", "split_tasks"]
