"""The parts of the battery that `bench_device.py` runs on a CUDA device, or on its twin on the CPU."""
