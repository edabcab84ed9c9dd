"""Expert-parallel layers over the store: the ranks of a job compute each their own experts, and tokens travel."""

from paramstore_client.moe.embedding import ColumnEmbedding
from paramstore_client.moe.expert_parallel import ExpertParallel
from paramstore_client.moe.pipeline_plan import Pipeline
from paramstore_client.nn.sharded import leave_out_of_ddp

__all__ = ["ColumnEmbedding", "ExpertParallel", "Pipeline", "leave_out_of_ddp"]
