"""Workloads with other processes: of one machine, over `torch.distributed`, and by way of Ray's object store."""

from __future__ import annotations

from workload import Context, Workload

from families.parallel import distributed, processes, store


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family; with `--quick`, a sixteenth of the bytes of the large ones."""
    return [workload for room in (processes, distributed, store) for workload in room.workloads(context)]
