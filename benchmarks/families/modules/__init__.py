"""Workloads on modules that read and write containers, beside the same modules called by hand with dicts."""

from __future__ import annotations

from workload import Context, Workload

from families.modules import plain, probabilistic


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family."""
    return [workload for room in (plain, probabilistic) for workload in room.workloads(context)]
