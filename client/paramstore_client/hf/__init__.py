"""Models of transformers (>= 5.7) with stored experts: `from_pretrained`, `from_config`, `experts`, `namespace`,
`counts`, `follow`, `following`, `trainer_callback`."""

from paramstore_client.hf.follower import Followed, Following, follow, following
from paramstore_client.hf.loading.stored_models import counts, experts, from_config, from_pretrained, namespace
from paramstore_client.hf.model.layout import ExpertLayout, ExpertTensor, find_layout
from paramstore_client.hf.trainer import trainer_callback

__all__ = [
    "ExpertLayout", "ExpertTensor", "Followed", "Following", "counts", "experts", "find_layout", "follow", "following",
    "from_config", "from_pretrained", "namespace", "trainer_callback",
]  # fmt: skip
