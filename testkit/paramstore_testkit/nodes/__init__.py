"""Nodes on one machine: network namespaces with shaped links, CPU quotas, and ranks of `torch.distributed` started on them."""
