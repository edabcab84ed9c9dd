"""The origin of a namespace's experts, which an import notes in the `extra` bytes of its step, and later commits carry on."""

from __future__ import annotations

import json
from dataclasses import dataclass

from paramstore.errors import CheckpointError
from paramstore_client.handle.dense_part import callers_extra

PATH_MAX = 4096


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint of an import. fingerprint: of its experts. source: its path at that time, for people. step: that it made; None
    where an older note does not say."""

    fingerprint: str
    source: str
    step: int | None = 0

    def to_extra(self) -> bytes:
        noted = {"fingerprint": self.fingerprint, "source": self.source[:PATH_MAX], "step": self.step}
        return json.dumps({"import": noted}).encode()

    @classmethod
    def from_extra(cls, extra: bytes) -> Origin | None:
        """The origin that `to_extra` packed, beside a dense part or alone; None if the bytes are anything else."""
        try:
            begun = json.loads(callers_extra(extra))["import"]
            fingerprint, source, step = str(begun["fingerprint"]), str(begun["source"]), begun.get("step")
            return cls(fingerprint, source, None if step is None else int(step))
        except (CheckpointError, ValueError, KeyError, TypeError):
            return None
