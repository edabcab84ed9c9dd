from __future__ import annotations

import subprocess
import sys

import pytest

import paramstore
import paramstore_client
from paramstore.errors import CLASSES

HEAVY = {"torch", "numpy", "transformers", "matplotlib", "lmdb", "typer", "rich", "pydantic"}


def test_every_error_is_exported() -> None:
    assert set(CLASSES) <= set(paramstore_client.__all__)
    assert paramstore_client.StepFailed is CLASSES["StepFailed"]


def test_public_names_are_those_of_the_package_too() -> None:
    assert paramstore.connect is paramstore_client.connect
    assert paramstore.AdamW is paramstore_client.AdamW


def test_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="StoreManager"):
        _ = paramstore_client.StoreManager


@pytest.mark.slow
@pytest.mark.parametrize("package", ["paramstore", "paramstore_client"])
def test_importing_the_client_loads_nothing_heavy(package: str) -> None:
    source = f"import {package} as ps, sys; ps.connect, ps.ServeOptions(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True, timeout=60)
    modules = set(done.stdout.split())
    assert "paramstore_client.client" in modules
    assert not modules & HEAVY
