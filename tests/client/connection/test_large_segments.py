"""Segments above 4 GiB as a client maps them: tensors lie where the message says. The memory is one hole."""

from __future__ import annotations

import fcntl
import os

import torch

from paramstore.bench.process import resident_bytes
from paramstore.core.schema import Schema
from paramstore.memory.arena import SHARED_SEALS
from paramstore.memory.shared import Mapping
from paramstore_client.tensors import field_view, image_view

GIB = 1 << 30
BORDER = 4 * GIB
SCHEMA = Schema.param({"w": ((BORDER + 4096,), "uint8"), "b": ((8,), "float32")})
START_BYTES = BORDER + (2 << 20)
LENGTH_BYTES = START_BYTES + SCHEMA.record_bytes + (-SCHEMA.record_bytes) % (2 << 20)


def test_tensors_of_a_lease_beyond_4_gib_see_the_daemons_bytes() -> None:
    before_bytes = resident_bytes(os.getpid())
    fd = os.memfd_create("large", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, LENGTH_BYTES)
    weights, biases = SCHEMA.stored.fields
    for element in (0, BORDER - 1, BORDER, BORDER + 4095):
        os.pwrite(fd, bytes([element % 251 + 1]), START_BYTES + weights.offset_bytes + element)
    os.pwrite(fd, torch.arange(8.0).numpy().tobytes(), START_BYTES + biases.offset_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SHARED_SEALS)
    mapping = Mapping(fd, LENGTH_BYTES, is_writable=False)
    os.close(fd)
    tensor = field_view(mapping, weights, START_BYTES)
    assert tensor.shape == (BORDER + 4096,)
    assert [tensor[at].item() for at in (0, BORDER - 1, BORDER, BORDER + 4095)] == [
        at % 251 + 1 for at in (0, BORDER - 1, BORDER, BORDER + 4095)
    ]
    assert tensor[BORDER + 1].item() == 0
    assert field_view(mapping, biases, START_BYTES).tolist() == list(range(8))
    image = image_view(mapping, START_BYTES, SCHEMA.record_bytes)
    assert image[weights.offset_bytes + BORDER].item() == BORDER % 251 + 1
    assert resident_bytes(os.getpid()) - before_bytes < 64 << 20
    mapping.close()
