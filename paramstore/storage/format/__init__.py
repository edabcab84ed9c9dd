"""The structures on a volume as bytes: superblocks, commit notes, record headers, apply logs, and the seal on each."""
