"""Training with stored experts has the bits of the unmodified model: a real daemon under want, exact updates, poisoned slots."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import paramstore as ps
from paramstore.errors import ParamStoreError
from paramstore_client.hf.export_checkpoint import export_checkpoint
from paramstore_testkit.processes.forked_daemon import ForkedDaemon
from paramstore_testkit.training.parity import Comparison, Reference, Stored, Trial, batches_of, save_checkpoint
from paramstore_testkit.training.saved_models import check_equal_files, tensors_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
STEPS = 6
FP32 = torch.float32
BUDGETS = ("--host-budget", "8MiB", "--volume-size", "160MiB")
ROOT = Path(__file__).resolve().parents[2]


def text() -> torch.Tensor:
    """Prose: the documents of this project."""
    prose = b"".join(file.read_bytes() for file in sorted((ROOT / "docs").glob("*.md")))
    return torch.frombuffer(bytearray(prose), dtype=torch.uint8)


def trial(store: ps.Store, path: Path, kernel: str, **options: object) -> Trial:
    common = {"kernel": kernel, "dtype": FP32, "steps": STEPS}
    ours = Stored(path, store=store, name="experts", **common)  # type: ignore[arg-type]
    beside = Comparison(Reference(path, has_masters=False, **common))  # type: ignore[arg-type]
    return Trial(ours, {"stock": beside}, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("family", "kernel"), [("qwen3_moe", "eager"), ("mixtral", "grouped_mm")])
def test_a_trained_model_and_its_export_have_the_bits_of_the_unmodified_one(tmp_path: Path, family: str, kernel: str) -> None:
    path = save_checkpoint(family, tmp_path / "checkpoint", dtype=FP32, seed=3)
    with ForkedDaemon(tmp_path / "store", *BUDGETS) as daemon, ps.connect(daemon.address, debug=True) as store:
        run = trial(store, path, kernel)
        run.run(batches_of(text(), steps=STEPS, seed=3), commit_every=4)
        run.compare(text()[:32].long()[None])
        stock = run.comparisons["stock"]
        assert stock.is_equal, {name: found.figures() for name, found in stock.differences.items()}
        counted = store.stats()["namespaces"]["experts"]
        assert min(run.idle) > 0, "in each step some experts have no token"
        assert counted["missed_steps_made"] > 0
        assert counted["optim"]["evictions"] > 0

        reference = stock.reference.model
        reference.save_pretrained(tmp_path / "stock")
        export_checkpoint(run.ours.model, tmp_path / "exported")
        check_equal_files(tmp_path / "stock", tmp_path / "exported")
        with pytest.raises(ParamStoreError):
            export_checkpoint(run.ours.model, tmp_path / "none", at=STEPS)  # not committed
        export_checkpoint(run.ours.model, tmp_path / "committed", at=4)
        assert tensors_of(tmp_path / "committed") != tensors_of(tmp_path / "stock")


def test_clipping_by_norm_differs_by_the_order_of_its_sums_alone(tmp_path: Path) -> None:
    path = save_checkpoint("mixtral", tmp_path / "checkpoint", dtype=FP32, seed=3)
    with ForkedDaemon(tmp_path / "store", *BUDGETS) as daemon, ps.connect(daemon.address, debug=True) as store:
        run = trial(store, path, "eager", max_norm=1.0, adopting="stock")
        run.run(batches_of(text(), steps=4, seed=3))
        stock = run.comparisons["stock"]
        assert stock.loss_difference == 0.0, "the step begins at equal weights"
        assert stock.norms[0][1] > 1.0, "nothing was clipped"
        assert stock.coefficient_difference(1.0) <= 1e-6
