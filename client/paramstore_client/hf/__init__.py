"""Models of transformers (>= 5.7) with stored experts: `from_pretrained`, `from_config`, `experts`, `namespace`,
`counts`, `speculation`, `follow`, `following`, `recording`, `trainer_callback`."""

from paramstore_client.hf.follower import Following, follow, following
from paramstore_client.hf.loading.newest_step import Followed
from paramstore_client.hf.loading.stored_models import counts, experts, from_config, from_pretrained, namespace, speculation
from paramstore_client.hf.model.early_loads import SpeculationFigures
from paramstore_client.hf.model.layout import ExpertLayout, ExpertTensor, find_layout
from paramstore_client.hf.model.recording import Recording
from paramstore_client.hf.recorder import recording
from paramstore_client.hf.trainer import trainer_callback

__all__ = [
    "ExpertLayout", "ExpertTensor", "Followed", "Following", "Recording", "SpeculationFigures", "counts", "experts", "find_layout",
    "follow", "following", "from_config", "from_pretrained", "namespace", "recording", "speculation", "trainer_callback",
]  # fmt: skip
