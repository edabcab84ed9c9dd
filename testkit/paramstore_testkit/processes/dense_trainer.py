"""A process that trains and commits as fast as it can, until it is ended: `-m ... ADDRESS NAME DIRECTORY`.

Every weight tells its step: dense ones are the step's number, and each step adds one to every element of every expert. One line on
stdout, when the model lies in DIRECTORY/saved.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import paramstore_client as ps
from paramstore_client.hf.compat import modeling
from paramstore_testkit.training.moe_families import tiny_config


def main(address: str, name: str, directory: Path) -> None:
    torch.set_num_threads(1)
    auto = modeling.transformers().AutoModelForCausalLM
    with ps.connect(address) as store:
        model = ps.hf.from_config(auto, tiny_config("qwen3_moe"), store=store, name=name, optimizer="sgd", updates="touched")
        experts = ps.hf.experts(model)
        namespace = experts.namespace
        model.save_pretrained(directory / "saved")
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        fields = {field.name: field.shape for field in namespace.schema.gradient_fields()}
        step = 0
        while True:
            step += 1
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.fill_(step)
            namespace.push({key: {field: torch.full(shape, -1.0) for field, shape in fields.items()} for key in namespace.space})
            experts.step(lr=1.0)
            experts.commit(step, dense=directory / "dense")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
