"""The oldest supported transformers, one from between, and the installed one: the same families, bit for bit, in each.

The one between is for `make soak`. An older version is installed once, with what it needs, into `.matrix/VERSION` at the root, that
git ignores; torch is the environment's own. Without a package index those not yet installed are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
MATRIX = ROOT / ".matrix"
VERSIONS = ("5.7.0", pytest.param("5.17.0", marks=pytest.mark.soak))
EVERY = "tests/client/hf/test_every_family.py::test_family_has_the_bits_of_the_unmodified_model"
TESTS = (
    "tests/client/hf/test_families.py", "tests/client/hf/model/test_module_list.py::test_stored_model_equals_the_unmodified_one",
    "tests/client/hf/loading/test_stored_models.py::test_saved_dense_part_and_the_namespace_make_the_model_again",
    "tests/client/hf/loading/test_stored_models.py::test_whole_checkpoint_is_loaded_without_its_experts_and_without_complaint",
    "tests/client/hf/test_follower.py::test_a_token_whose_step_is_dropped_within_it_is_computed_again_at_the_newest",
    f"{EVERY}[qwen3_vl_moe-torch.bfloat16]", f"{EVERY}[qwen3_omni_moe-torch.bfloat16]",
)  # fmt: skip
INSTALL_TIMEOUT_S = 600
TEST_TIMEOUT_S = 600


@pytest.mark.parametrize("version", VERSIONS)
def test_version_runs_all_families(version: str) -> None:
    packages = installed(version)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), *sys.path]), "TOKENIZERS_PARALLELISM": "false"}
    check = f"import transformers; assert transformers.__version__ == {version!r}, transformers.__version__"
    subprocess.run([sys.executable, "-c", check], env=environment, check=True, timeout=TEST_TIMEOUT_S)
    command = [sys.executable, "-m", "pytest", *TESTS, "-q", "-W", "default", "-p", "no:cacheprovider"]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TEST_TIMEOUT_S)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]


def installed(version: str) -> Path:
    """The packages of transformers `version`, installed if they are not yet."""
    target = MATRIX / version
    if (target / "transformers").is_dir():
        return target
    made = MATRIX / f"{version}.part"
    shutil.rmtree(made, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(made), f"transformers=={version}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_TIMEOUT_S)
    if ran.returncode != 0:
        shutil.rmtree(made, ignore_errors=True)
        pytest.skip(f"transformers {version} cannot be installed here: {ran.stderr.strip().splitlines()[-1:]}")
    assert not (made / "torch").exists(), "torch is the environment's own"
    made.rename(target)
    return target
