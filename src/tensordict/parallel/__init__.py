"""Several processes of one machine: shared memory, and functions mapped over chunks by worker processes."""
