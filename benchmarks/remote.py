"""Saving, loading and training over a slow link, beside raw transfers and other libraries for streaming.

    make bench-remote                                   # everything, some minutes; BENCH='--only epoch' chooses
    .venv-remote/bin/python benchmarks/remote.py --only epoch --delays 100 --bandwidth 50

`s3_server.py` answers each request after a delay (1, 20, 100 ms), and all answers share a link of 50 MB/s. The data set
has 1,000 shards of 128 rows of 3,208 bytes, once in each format, and once more in 50 shards of 2,560 rows. Every figure
comes from a process of its own, which has connected before; whole objects are the median of three. An epoch of this
package is whole; other libraries are measured for some seconds from the start of their iteration, without and with
worker processes. They mix as many rows as this package does: 4,096 rows, or 32 shards.

Server and clients share the processors. On two of them, an epoch took 7 to 8 seconds of processor time in 8.5 seconds.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from s3_server import Control, run_server

SHARDS, ROWS, BATCH, MIXED = 1000, 128, 256, 32
# The shards of the data set with few, large shards are so many times as large.
LARGE = 20
ROW_BYTES = 3 * 32 * 32 + 32 * 4 + 8
WHOLE = 128 << 20
BUCKET = "bench"
Found = dict[str, float]


def main() -> None:
    """Write the data, run each part in a process of its own for each delay, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delays", default="1,20,100", help="milliseconds, separated by commas")
    parser.add_argument("--bandwidth", type=float, default=50.0, help="MB/s of the link")
    parser.add_argument("--shards", type=int, default=SHARDS)
    parser.add_argument("--seconds", type=float, default=8.0, help="how long other libraries read of an epoch")
    parser.add_argument("--only", default="", help="parts whose name contains one of these, separated by commas")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part](options)))
        return
    chosen = [name for name in READERS if any(word in name for word in options.only.split(","))]
    figures: list[dict[str, Any]] = []
    with run_server() as server:
        for name in WRITERS:
            if any(WRITES[part] == name for part in chosen):
                _run(name, options, server)
        for delay in map(float, options.delays.split(",")):
            server.set(delay=delay / 1000, bandwidth=options.bandwidth * 1e6)
            for name in chosen:
                server.reset()
                found = _run(name, options, server)
                row = {"delay": delay, "part": name, **found}
                figures.append(row)
                print(f"{delay:5.0f} ms  {name:34} " + "  ".join(f"{key} {value:,.2f}" for key, value in found.items()))
                sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps({"bandwidth": options.bandwidth, "figures": figures}, indent=1))


def _run(name: str, options: argparse.Namespace, server: Control) -> Found:
    command = [sys.executable, "-W", "ignore", __file__, "--part", name, "--url", server.url]
    command += ["--shards", str(options.shards), "--seconds", str(options.seconds)]
    known = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    known |= {"S3_ENDPOINT_URL": server.url, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory(prefix="tensordict-bench-") as folder:
        known |= {"HF_HOME": folder, "BENCH_FOLDER": folder}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env={**os.environ, **known})
    if done.returncode:
        return {"failed": done.returncode}
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


# --- what both sides use ----------------------------------------------------------------------------------------------


def _storage(options: argparse.Namespace) -> dict[str, Any]:
    return {"endpoint_url": options.url, "key": "a", "secret": "b", "allow_secrets": True}


def _s3fs(options: argparse.Namespace) -> Any:
    import s3fs

    return s3fs.S3FileSystem(endpoint_url=options.url, key="a", secret="b")


def _obstore(options: argparse.Namespace) -> Any:
    from obstore.store import S3Store

    keys = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
    return S3Store(BUCKET, endpoint=options.url, client_options={"allow_http": True}, **keys)


def _counts(options: argparse.Namespace) -> Any:
    return Control(options.url).counts()


def _shard(number: int) -> dict[str, Any]:
    """Return the rows of a shard."""
    import torch

    generator = torch.Generator().manual_seed(number)
    return {
        "image": torch.randint(256, (ROWS, 3, 32, 32), dtype=torch.uint8, generator=generator),
        "state": torch.rand(ROWS, 32, generator=generator),
        "number": torch.arange(number * ROWS, (number + 1) * ROWS),
    }


def _records(number: int) -> Iterator[bytes]:
    """Yield the rows of a shard as bytes."""
    shard = {key: value.numpy() for key, value in _shard(number).items()}
    for row in range(ROWS):
        yield shard["image"][row].tobytes() + shard["state"][row].tobytes() + shard["number"][row].tobytes()


def _upload(options: argparse.Namespace, files: Iterator[tuple[str, bytes]]) -> None:
    store = _s3fs(options)
    for name, content in files:
        store.pipe_file(f"{BUCKET}/{name}", content)


# --- writing, not measured --------------------------------------------------------------------------------------------


def _write_whole(options: argparse.Namespace) -> Found:
    _whole().save(f"s3://{BUCKET}/whole.tdz", storage_options=_storage(options), overwrite=True)
    return {}


def _whole() -> Any:
    import torch

    from tensordict import TensorDict

    return TensorDict({str(key): torch.randn(8, WHOLE // 256) for key in range(8)}, [8])


def _write_ours(options: argparse.Namespace) -> Found:
    from tensordict import DatasetWriter, TensorDict
    from tensordict.datasets import compact

    for name, rows in (("data", ROWS), ("large", ROWS * LARGE)):
        url = f"s3://{BUCKET}/{name}"
        with DatasetWriter(url, rows_per_shard=rows, storage_options=_storage(options)) as writer:
            for number in range(options.shards):
                writer.extend(TensorDict(_shard(number), [ROWS]))
        compact(url, rows_per_shard=rows, storage_options=_storage(options))
    return {}


def _write_tars(options: argparse.Namespace) -> Found:
    def tar(number: int) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as file:
            for row, content in enumerate(_records(number)):
                info = tarfile.TarInfo(f"{number * ROWS + row:08}.bin")
                info.size = len(content)
                file.addfile(info, io.BytesIO(content))
        return out.getvalue()

    _upload(options, ((f"wds/{number:06}.tar", tar(number)) for number in range(options.shards)))
    return {}


def _write_mds(options: argparse.Namespace) -> Found:
    _import_streaming()
    from streaming import MDSWriter

    folder = Path(os.environ["BENCH_FOLDER"], "mds")
    # 4 bytes a row for its place, 4 for its length.
    limit = ROWS * (ROW_BYTES + 8) + 1024
    with MDSWriter(out=str(folder), columns={"row": "bytes"}, size_limit=limit) as writer:
        for number in range(options.shards):
            for record in _records(number):
                writer.write({"row": record})
    _upload(options, ((f"mds/{path.name}", path.read_bytes()) for path in folder.iterdir()))
    return {}


def _write_parquet(options: argparse.Namespace) -> Found:
    import pyarrow
    from pyarrow import parquet

    def table(number: int) -> bytes:
        out = io.BytesIO()
        parquet.write_table(pyarrow.table({"row": list(_records(number))}), out, compression="none")
        return out.getvalue()

    _upload(options, ((f"hf/{number:06}.parquet", table(number)) for number in range(options.shards)))
    return {}


def _import_streaming() -> None:
    """Import MosaicML's streaming without the large packages for images and texts, which MDS does not need."""
    warnings.simplefilter("ignore")
    for name in (
        "torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional",
        "transformers", "transformers.feature_extraction_utils", "transformers.models", "transformers.models.auto",
        "transformers.models.auto.tokenization_auto", "transformers.tokenization_utils_base",
    ):  # fmt: skip
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__dict__["__path__"] = []
        for attribute in ("CIFAR10", "VisionDataset", "to_tensor", "BatchFeature", "BatchEncoding", "AutoTokenizer"):
            setattr(module, attribute, type(attribute, (), {}))
        sys.modules[name] = module
    import streaming  # noqa: F401


# --- whole objects ----------------------------------------------------------------------------------------------------


def _time(call: Callable[[], object], options: argparse.Namespace) -> Found:
    before = sum(_counts(options).requests.values())
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "requests": sum(_counts(options).requests.values()) - before}


def _time_whole(call: Callable[[], object], options: argparse.Namespace) -> Found:
    """Return the median of three calls that transfer the large object."""
    found = sorted((_time(call, options) for _ in range(3)), key=lambda each: each["seconds"])[1]
    return {"MB/s": WHOLE / found["seconds"] / 1e6, **found}


def _load(options: argparse.Namespace) -> Found:
    from tensordict import load
    from tensordict.io.remote.urls import Remote

    Remote(f"s3://{BUCKET}", _storage(options)).find("no")
    url = f"s3://{BUCKET}/whole.tdz"
    return _time_whole(lambda: load(url, storage_options=_storage(options)), options)


def _load_s3fs(options: argparse.Namespace) -> Found:
    store = _s3fs(options)
    store.exists(f"{BUCKET}/no")
    return _time_whole(lambda: store.cat_file(f"{BUCKET}/whole.tdz"), options)


def _load_obstore(options: argparse.Namespace) -> Found:
    import obstore

    store = _obstore(options)
    return _time_whole(lambda: obstore.get(store, "whole.tdz").bytes(), options)


def _save(options: argparse.Namespace) -> Found:
    from tensordict.io.remote.urls import Remote

    td = _whole()
    Remote(f"s3://{BUCKET}", _storage(options)).find("no")
    return _time_whole(
        lambda: td.save(f"s3://{BUCKET}/new-{time.time_ns()}.tdz", storage_options=_storage(options)), options
    )


def _local_file() -> str:
    path = f"{os.environ['BENCH_FOLDER']}/file"
    Path(path).write_bytes(os.urandom(WHOLE))
    return path


def _save_s3fs(options: argparse.Namespace) -> Found:
    path, store = _local_file(), _s3fs(options)
    store.exists(f"{BUCKET}/no")
    return _time_whole(lambda: store.put_file(path, f"{BUCKET}/raw-{time.time_ns()}"), options)


def _save_obstore(options: argparse.Namespace) -> Found:
    import obstore

    path, store = _local_file(), _obstore(options)
    return _time_whole(lambda: obstore.put(store, f"raw-{time.time_ns()}", Path(path)), options)


# --- rows -------------------------------------------------------------------------------------------------------------


def _open(options: argparse.Namespace, name: str = "data") -> Any:
    from tensordict import open_dataset

    return open_dataset(f"s3://{BUCKET}/{name}", storage_options=_storage(options))


def _positions(options: argparse.Namespace, count: int, times: int) -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randint(options.shards * ROWS, (count,), generator=generator) for _ in range(times)]


def _measure_reads(
    read: Callable[[Any], object], options: argparse.Namespace, count: int, times: int, rows: int = ROWS
) -> Found:
    """Return the median time of reads of rows, and the requests of the first one."""
    seconds, requests, touched = [], [], []
    for at in _positions(options, count, times):
        found = _time(lambda at=at: read(at), options)  # type: ignore[misc]
        seconds.append(found["seconds"])
        requests.append(found["requests"])
        touched.append(len((at // rows).unique()))
    return {
        "first s": seconds[0],
        "median s": statistics.median(seconds),
        "requests": requests[0],
        "shards": touched[0],
        "most requests a shard": max(each / shards for each, shards in zip(requests, touched, strict=True)),
    }


def _row(options: argparse.Namespace) -> Found:
    data = _open(options)
    return _measure_reads(lambda at: data[int(at)], options, 1, 5)


def _batch(options: argparse.Namespace, name: str, rows: int) -> Found:
    data = _open(options, name)
    return _measure_reads(lambda at: data[at], options, BATCH, 4, rows)


def _ranges(options: argparse.Namespace, name: str, rows: Any) -> tuple[list[str], list[int], list[int]]:
    """Return the ranges of rows of the tars: the least that any reader could request."""
    size = 512 + -(-ROW_BYTES // 512) * 512
    numbers = rows.tolist()
    paths = [f"{name}/{row // ROWS:06}.tar" for row in numbers]
    starts = [row % ROWS * size + 512 for row in numbers]
    return paths, starts, [start + ROW_BYTES for start in starts]


def _ranges_s3fs(options: argparse.Namespace, count: int, times: int) -> Found:
    store = _s3fs(options)
    store.exists(f"{BUCKET}/no")
    return _measure_reads(lambda at: store.cat_ranges(*_ranges(options, f"{BUCKET}/wds", at)), options, count, times)


def _ranges_obstore(options: argparse.Namespace, count: int, times: int) -> Found:
    import asyncio

    store = _obstore(options)

    async def read(at: Any) -> None:
        # One call for each object, as it joins neighbours there.
        each: dict[str, tuple[list[int], list[int]]] = {}
        for path, start, stop in zip(*_ranges(options, "wds", at), strict=True):
            starts, stops = each.setdefault(path, ([], []))
            starts.append(start)
            stops.append(stop)
        await asyncio.gather(
            *(store.get_ranges_async(path, starts=starts, ends=stops) for path, (starts, stops) in each.items())
        )

    return _measure_reads(lambda at: asyncio.run(read(at)), options, count, times)


def _open_mosaic(options: argparse.Namespace, **more: Any) -> Any:
    _import_streaming()
    from streaming import StreamingDataset

    local = f"{os.environ['BENCH_FOLDER']}/local"
    return StreamingDataset(remote=f"s3://{BUCKET}/mds", local=local, batch_size=BATCH, **more)


def _mosaic_rows(options: argparse.Namespace, count: int, times: int) -> Found:
    data = _open_mosaic(options)
    return _measure_reads(lambda at: [data[int(row)] for row in at], options, count, times)


# --- an epoch ---------------------------------------------------------------------------------------------------------


def _measure_epoch(batches: Any, options: argparse.Namespace, seconds: float = 1e9) -> Found:
    """Iterate, up to this time. Return the rate in bytes of rows, and the peak of the memory that is not of files."""
    start = time.perf_counter()
    rows, peak, first = 0, 0, 0.0
    base = _memory()
    for batch in batches:
        rows += len(batch)
        first = first or time.perf_counter() - start
        peak = max(peak, _memory() - base)
        if time.perf_counter() - start > seconds:
            break
    elapsed = time.perf_counter() - start
    counts = _counts(options)
    return {
        "MB/s": rows * ROW_BYTES / elapsed / 1e6,
        "first s": first,
        "rows": rows,
        "peak MiB": peak / 2**20,
        "connections": counts.connections,
        "requests": sum(counts.requests.values()),
    }


def _memory() -> int:
    return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])


def _epoch(options: argparse.Namespace, shuffle: int, **more: int) -> Found:
    from tensordict.datasets import DatasetLoader

    data = _open(options)
    Control(options.url).reset()
    return _measure_epoch(DatasetLoader(data, BATCH, shuffle=shuffle, **more), options)  # type: ignore[arg-type]


def _load_batches(data: Any, workers: int) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(data, batch_size=BATCH, num_workers=workers, collate_fn=list)


def _epoch_webdataset(options: argparse.Namespace, workers: int) -> Found:
    import webdataset

    url = f"pipe:curl -s {options.url}/{BUCKET}/wds/{{000000..{options.shards - 1:06}}}.tar"
    data = webdataset.WebDataset(url, shardshuffle=options.shards).shuffle(MIXED * ROWS)
    return _measure_epoch(_load_batches(data, workers), options, options.seconds)


def _epoch_mosaic(options: argparse.Namespace, workers: int) -> Found:
    data = _open_mosaic(options, shuffle=True, shuffle_block_size=MIXED * ROWS, predownload=MIXED * ROWS)
    return _measure_epoch(_load_batches(data, workers), options, options.seconds)


def _epoch_hugging_face(options: argparse.Namespace, workers: int) -> Found:
    from datasets import load_dataset

    # Each name on its own would be looked up alone, one after the other.
    files = f"s3://{BUCKET}/hf/*.parquet"
    storage = {"endpoint_url": options.url, "key": "a", "secret": "b"}
    data = load_dataset("parquet", data_files=files, split="train", streaming=True, storage_options=storage)
    Control(options.url).reset()
    return _measure_epoch(_load_batches(data.shuffle(buffer_size=MIXED * ROWS), workers), options, options.seconds)


WRITERS: dict[str, Callable[[argparse.Namespace], Found]] = {
    "write whole": _write_whole,
    "write ours": _write_ours,
    "write tars": _write_tars,
    "write mds": _write_mds,
    "write parquet": _write_parquet,
}
"""Parts that write what others read."""

READERS: dict[str, tuple[str, Callable[[argparse.Namespace], Found]]] = {
    "save: tensordict": ("", _save),
    "save: s3fs": ("", _save_s3fs),
    "save: obstore": ("", _save_obstore),
    "load: tensordict": ("write whole", _load),
    "load: s3fs": ("write whole", _load_s3fs),
    "load: obstore": ("write whole", _load_obstore),
    "row: tensordict": ("write ours", _row),
    "row: s3fs, the range alone": ("write tars", lambda options: _ranges_s3fs(options, 1, 5)),
    "row: MosaicML": ("write mds", lambda options: _mosaic_rows(options, 1, 5)),
    "row: obstore, the range alone": ("write tars", lambda options: _ranges_obstore(options, 1, 5)),
    "batch: tensordict": ("write ours", lambda options: _batch(options, "data", ROWS)),
    "batch: tensordict, large shards": ("write ours", lambda options: _batch(options, "large", ROWS * LARGE)),
    "batch: s3fs, the ranges alone": ("write tars", lambda options: _ranges_s3fs(options, BATCH, 4)),
    "batch: obstore, the ranges alone": ("write tars", lambda options: _ranges_obstore(options, BATCH, 4)),
    "batch: MosaicML": ("write mds", lambda options: _mosaic_rows(options, BATCH, 1)),
    "epoch: tensordict, in order": ("write ours", lambda options: _epoch(options, False)),
    "epoch: tensordict, 32 mixed": ("write ours", lambda options: _epoch(options, MIXED)),
    "epoch: tensordict, 16 MiB ahead": ("write ours", lambda options: _epoch(options, MIXED, read_ahead=16 << 20)),
    "epoch: WebDataset": ("write tars", lambda options: _epoch_webdataset(options, 0)),
    "epoch: WebDataset, 8 workers": ("write tars", lambda options: _epoch_webdataset(options, 8)),
    "epoch: MosaicML": ("write mds", lambda options: _epoch_mosaic(options, 0)),
    "epoch: MosaicML, 2 workers": ("write mds", lambda options: _epoch_mosaic(options, 2)),
    "epoch: MosaicML, 8 workers": ("write mds", lambda options: _epoch_mosaic(options, 8)),
    "epoch: Hugging Face": ("write parquet", lambda options: _epoch_hugging_face(options, 0)),
    "epoch: Hugging Face, 8 workers": ("write parquet", lambda options: _epoch_hugging_face(options, 8)),
}
"""What is measured, with the part that writes its data."""

WRITES = {name: writer for name, (writer, _) in READERS.items()}
PARTS = {**WRITERS, **{name: part for name, (_, part) in READERS.items()}}


if __name__ == "__main__":
    main()
