"""Expert-parallel layers over the store: the ranks of a job compute each their own experts, and tokens travel."""

from paramstore.core.placement import Placement
from paramstore_client.moe.balance.tasks import TaskRows, split_tasks
from paramstore_client.moe.embedding import ColumnEmbedding
from paramstore_client.moe.expert_parallel import ExpertParallel
from paramstore_client.moe.pipeline_plan import Pipeline, PipelineSearch
from paramstore_client.nn.sharded import leave_out_of_ddp

__all__ = [
    "ColumnEmbedding", "ExpertParallel", "Pipeline", "PipelineSearch", "Placement", "TaskRows", "leave_out_of_ddp", "split_tasks",
]  # fmt: skip
