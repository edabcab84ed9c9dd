import torch

import paramstore as ps

schema = ps.adamw_schema({"w": (64, 64)}, param_dtype=torch.bfloat16)
daemon = ps.ServeOptions(dir="quickstart-data", host_budget="32MiB", volume_size="64MiB")
with ps.connect(autostart=daemon, timeout_s=60) as store:  # starts the daemon, unless it runs already
    try:
        trainer = store.create_namespace("moe", schema, layers=2, experts=4)
        trainer.initialize(lambda key: {"w": torch.full((64, 64), 1.0 + key[0])})
        trainer.commit(0).wait()  # durable from here on
    except ps.NamespaceExists:  # a second run goes on where the first one ended
        trainer = store.open_namespace("moe", mode="write")
    reader = store.open_namespace("moe")  # stands on the newest step until it refreshes
    old, new = reader.view_step, reader.view_step + 1

    keys = [(0, 1), (1, 3)]  # (layer, expert)
    trainer.push({key: {"w": torch.ones(64, 64, dtype=torch.bfloat16)} for key in keys})
    trainer.apply(ps.AdamW(lr=0.5))  # the daemon updates the two records
    trainer.commit(new).wait()
    for namespace, step in ((reader, old), (trainer, new)):
        with namespace.acquire(keys) as lease:  # views of shared memory: no copy, read-only
            print(f"step {step}:", [lease[key]["w"].mean().item() for key in keys])
    print("the reader moves on to step", reader.refresh())
