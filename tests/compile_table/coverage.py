"""Public methods that have no row, with the reason."""

from __future__ import annotations

LEFT_OUT: dict[str, set[str]] = {
    "reads and writes files": {
        "dumps", "from_arrow", "from_consolidated", "from_csv", "from_h5", "from_hf", "from_json", "from_mds",
        "from_pandas", "from_parquet", "from_polars", "from_safetensors", "from_zarr", "load", "load_", "load_memmap",
        "load_memmap_", "make_memmap", "make_memmap_from_storage", "make_memmap_from_tensor", "memmap", "memmap_",
        "memmap_like", "memmap_refresh_", "plot", "save", "saved_path", "to_arrow", "to_csv", "to_h5", "to_hf",
        "to_json", "to_mds", "to_pandas", "to_parquet", "to_polars", "to_safetensors", "to_store", "to_zarr",
    },
    "talks to other processes": {
        "all_gather", "all_reduce", "arecv", "asend", "broadcast", "from_remote_init", "gather_and_stack",
        "init_remote", "irecv", "isend", "map", "map_iter", "recv", "reduce", "scatter", "send", "share_memory_",
    },
    "needs a GPU": {"cuda", "pin_memory", "pin_memory_", "record_stream"},
    "raises in eager code, since torch makes no quantized tensor by a cast": {"qint32", "qint8", "quint4x2", "quint8"},
}  # fmt: skip
