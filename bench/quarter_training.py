"""Runs bench_training.py of the checkout in the current directory with a quarter of the states resident, on a model that is small
enough for fifteen pairs of runs and large enough that the least host budget is less than this quarter.

`cd CHECKOUT; .venv/bin/python .../quarter_training.py [--dir DIR] [--out FILE]`: `bench_versions.py` does this for two checkouts.
"""

from __future__ import annotations

import runpy
import sys

SHAPE = {"layers": 2, "experts": 32, "hidden": 512, "inner": 256, "top_k": 4, "rows": 2, "context": 128}
SCRIPT = "bench/bench_training.py"


def main() -> None:
    """Runs the script of the checkout. Ends as it does."""
    sys.path[0] = "bench"
    import training_models  # that of the checkout

    training_models.QUICK = training_models.Shape(**SHAPE)
    sys.argv = [SCRIPT, "--quick", "--budgets", "0.25", "--rules", "exact", *sys.argv[1:]]
    runpy.run_path(SCRIPT, run_name="__main__")


if __name__ == "__main__":
    main()
