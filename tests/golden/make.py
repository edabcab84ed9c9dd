"""Makes the store that `format-1.tar.xz` holds: `python tests/golden/make.py DIR`, with the paramstore whose format is to be kept.

It has a bit of everything that is laid out on volumes: two volumes, steps, a snapshot, missed steps of an exact namespace, 8-bit
states, weights alone, a prepared step, a draft; and its daemon was killed. DIR/expected.json has the digest of every record.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch

import paramstore as ps

SHAPE = (32, 8)
KEYS = [(layer, expert) for layer in range(2) for expert in range(2)]
STEPS = {"touched": (1, 2, 3), "exact": (2, 3), "quantized": (1,), "weights": (1,), "prepared": (1,)}
"""Committed steps that can be opened, by namespace."""


def main() -> None:
    directory = Path(sys.argv[1])
    settings = {"prefill": False, "io_workers": 2, "update_workers": 1}
    options = ps.ServeOptions(
        dir=directory, host_budget="64MiB", volumes=[directory / "one", directory / "two"], settings=settings
    )
    with ps.connect(autostart=options, timeout_s=60) as store:
        fill(store)
        expected = {
            name: {str(step): digests(store.open_namespace(name, at=step)) for step in steps} for name, steps in STEPS.items()
        }
        pid = store.stats()["daemon"]["pid"]
        os.kill(pid, signal.SIGKILL)
    (directory / "expected.json").write_text(json.dumps(expected, indent=1))


def fill(store: ps.Store) -> None:
    shapes = {"w": SHAPE}
    touched = made(store, "touched", ps.adamw_schema(shapes, param_dtype=torch.bfloat16))
    touched.snapshot(1).close()
    for step in (2, 3):
        train(touched, KEYS[step - 2 :: 2])
        touched.commit(step, f"step {step}".encode()).wait()
    train(touched, KEYS)  # lost by the kill
    exact = made(store, "exact", ps.adamw_schema(shapes, param_dtype=torch.float32, updates="exact"))
    for step in (2, 3):
        for _ in range(step):
            train(exact, KEYS[:1])
        exact.commit(step).wait()
    made(store, "quantized", ps.adamw_schema(shapes, param_dtype=torch.bfloat16, state_dtype="int8_blockwise"))
    made(store, "weights", ps.param_schema({"w": (SHAPE, torch.bfloat16)}))
    prepared = made(store, "prepared", ps.adamw_schema(shapes, param_dtype=torch.bfloat16))
    train(prepared, KEYS[:2])
    prepared.prepare(2, b"half").wait()
    draft = store.create_namespace("draft", ps.adamw_schema(shapes, param_dtype=torch.bfloat16), layers=2, experts=2)
    begun = draft.begin_initialize()
    begun.put(KEYS[0], value(KEYS[0], torch.float32))
    begun.save(b"one of four")


def made(store: ps.Store, name: str, schema: ps.Schema) -> ps.Namespace:
    namespace = store.create_namespace(name, schema, layers=2, experts=2)
    dtype = torch.float32 if name != "weights" else torch.bfloat16
    namespace.initialize(lambda key: value(key, dtype))
    namespace.commit(1, b"first").wait()
    return namespace


def value(key: tuple[int, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * key[0] + key[1])
    return {"w": torch.randn(SHAPE, generator=generator).to(dtype)}


def train(namespace: ps.Namespace, keys: list[tuple[int, int]]) -> None:
    dtype = getattr(torch, namespace.schema.gradient_dtype)
    namespace.push({key: {"w": torch.full(SHAPE, 0.5, dtype=dtype)} for key in keys})
    namespace.apply(ps.AdamW(lr=0.1)).wait()


def digests(namespace: ps.Namespace) -> dict[str, str]:
    """sha256 of every record, its fields by name."""
    with namespace:
        return {f"{layer}/{expert}": digest(namespace.read((layer, expert))) for layer, expert in KEYS}


def digest(fields: dict[str, torch.Tensor]) -> str:
    hashed = hashlib.sha256()
    for name in sorted(fields):
        hashed.update(name.encode())
        hashed.update(fields[name].contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


if __name__ == "__main__":
    main()
