from __future__ import annotations

import subprocess
import sys

import pytest

import paramstore
import paramstore_client
from paramstore.errors import CLASSES

WITHOUT_TORCH = "import paramstore_client as ps, sys; ps.connect, ps.ServeOptions(); sys.exit('torch' in sys.modules)"


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
def test_importing_the_client_does_not_import_torch() -> None:
    assert subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=False).returncode == 0
