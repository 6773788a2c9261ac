"""Several processes: shared memory, functions mapped over chunks by worker processes, and `torch.distributed`."""
