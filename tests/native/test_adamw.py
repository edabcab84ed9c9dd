"""AdamW's kernel is not used where torch computes otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from paramstore_native.adamw import ADAMW

pytestmark = pytest.mark.skipif(ADAMW.kernel() is None, reason=ADAMW.known_state())


@pytest.mark.slow
def test_where_torch_computes_otherwise_torch_is_used() -> None:
    program = "from paramstore_native.adamw import ADAMW; ADAMW.kernel(); print(ADAMW.known_state())"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    if platform.machine() == "x86_64":
        assert "differ from those of torch" in done.stdout
        assert "(DEFAULT)" in done.stdout
