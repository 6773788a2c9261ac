"""The names of the families of workloads, in the order of the table."""

from __future__ import annotations

IN_MEMORY = (
    "construction",
    "access",
    "views",
    "indexing",
    "shape",
    "pieces",
    "copies",
    "locking",
    "apply",
    "casting",
    "pointwise",
    "settings",
    "lazy",
    "reductions",
    "names",
    "ragged",
    "tensorclass",
    "functional",
    "modules",
    "compile",
)
FAMILIES = (*IN_MEMORY, "storage", "parallel", "gpu")
