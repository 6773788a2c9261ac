"""Workloads that save containers and load them back, a file per format."""

from __future__ import annotations

from workload import Context, Workload

from families.storage import archive, busy, consolidated, directory, hdf5, safetensors, zarr
from families.storage.raw import Sizes


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family; with `--quick`, a sixteenth of the bytes, a tenth of the files."""
    sizes = Sizes.of(context)
    rooms = (directory, archive, safetensors, consolidated, hdf5, zarr, busy)
    return [workload for room in rooms for workload in room.workloads(context, sizes)]
