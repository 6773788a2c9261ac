"""Run by test_mds.py where mosaicml-streaming is installed: rows to MDS and back, a line of JSON for each case."""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

warnings.simplefilter("ignore")
# Streaming imports these large packages for images and texts. MDS does not need them.
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

import streaming  # noqa: E402
import torch  # noqa: E402

from tensordict import TensorDict, lazy_stack  # noqa: E402


def rows() -> TensorDict:
    return TensorDict(
        whole=torch.arange(5) - 2,
        small=torch.arange(5, dtype=torch.uint8),
        half=torch.arange(5).half() / 3,
        image=torch.arange(40.0).view(5, 2, 4) / 7,
        flag=torch.tensor([True, False, True, True, False]),
        brain=torch.arange(5).bfloat16() / 4,
        same="x",
        text=["a", "b", "", "ä", "e"],
        data=[b"1", b"", b"\0", b"4", b"5"],
        ratio=TensorDict(price=torch.arange(5) / 9, batch_size=5),
        record=[{"k": i} for i in range(5)],
        batch_size=5,
    )


def kept(td: Any, folder: str, **options: object) -> Any:
    td.to_mds(out=folder, **options)
    return TensorDict.from_mds(folder)


def columns(folder: str) -> dict[str, str]:
    with open(f"{folder}/index.json") as file:
        shard = json.load(file)["shards"][0]
    return dict(zip(shard["column_names"], shard["column_encodings"], strict=True))


def refused(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def same(found: Any, td: Any) -> list[str]:
    """The entries that differ."""
    names = [key for key in td.keys(True, True) if key not in ("flag", "brain")]
    different = [str(key) for key in names if not torch.equal(found[key], td[key]) or found[key].dtype != td[key].dtype]
    for key in ("text", "data", "record", "same"):
        if list(found[key]) != (["x"] * 5 if key == "same" else list(td[key])):
            different.append(key)
    for key, dtype in (("flag", torch.uint8), ("brain", torch.float32)):
        if found[key].dtype != dtype or not torch.equal(found[key], td[key].to(dtype)):
            different.append(key)
    return different


def main(folder: str) -> dict[str, Any]:
    td = rows()
    said: dict[str, Any] = {"same": same(kept(td, f"{folder}/plain"), td), "columns": columns(f"{folder}/plain")}
    # Several shards, packed, which have to be unpacked elsewhere.
    said["packed"] = same(kept(td, f"{folder}/packed", compression="zstd", hashes=["sha1"], size_limit="400b"), td)
    said["files"] = sorted(os.listdir(f"{folder}/packed"))
    data = streaming.LocalDataset(local=f"{folder}/plain")
    said["read by streaming"] = [
        len(data),
        data[1]["text"],
        data[1]["whole"],
        data[3]["image"].tolist() == td["image"][3].tolist(),
    ]
    uneven = lazy_stack([TensorDict(a=i, c=torch.ones(i + 1, 2)) for i in range(3)])
    found = kept(uneven, f"{folder}/uneven")
    said["uneven"] = [
        columns(f"{folder}/uneven"),
        found["a"].tolist(),
        [list(row.shape) for row in found["c"].unbind()],
    ]
    nested = TensorDict(a=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), batch_size=2)
    said["ragged"] = [row.tolist() for row in kept(nested, f"{folder}/ragged")["a"].unbind()]
    with streaming.MDSWriter(out=f"{folder}/two", columns={"whole": "int64"}) as writer:
        for _ in range(2):
            td.to_mds(writer=writer, finish_writer=False, columns={"whole": "int64"})
    said["writer"] = TensorDict.from_mds(f"{folder}/two")["whole"].tolist()
    said["exists"] = refused(lambda: td.to_mds(out=f"{folder}/plain"))
    said["complex"] = refused(
        lambda: TensorDict(z=torch.zeros(2, dtype=torch.complex64), batch_size=2).to_mds(out=f"{folder}/z")
    )
    said["object"] = refused(
        lambda: TensorDict(a={"o": [object(), 1]}, batch_size=[]).expand(2).to_mds(out=f"{folder}/o")
    )
    said["wrong column"] = refused(lambda: td.to_mds(out=f"{folder}/w", columns={"text": "int"}))
    said["unknown column"] = refused(lambda: td.to_mds(out=f"{folder}/u", columns={"nothing": "int"}))
    said["left"] = [name for name in ("z", "o", "w", "u") if os.path.exists(f"{folder}/{name}")]
    with streaming.MDSWriter(out=f"{folder}/pickled", columns={"p": "pkl"}) as writer:
        writer.write({"p": [1]})
    said["pickled"] = refused(lambda: TensorDict.from_mds(f"{folder}/pickled"))
    with streaming.MDSWriter(out=f"{folder}/clash", columns={"a": "int", "a.b": "int"}) as writer:
        writer.write({"a": 1, "a.b": 2})
    said["clash"] = refused(lambda: TensorDict.from_mds(f"{folder}/clash"))
    said["apart"] = sorted(TensorDict.from_mds(f"{folder}/clash", separator=None).keys())
    with open(f"{folder}/plain/index.json") as file:
        text = file.read()
    for name, wrong in {"elsewhere": text.replace("shard.00000.mds", "../../etc/passwd"), "broken": text[:50]}.items():
        os.mkdir(f"{folder}/{name}")
        with open(f"{folder}/{name}/index.json", "w") as file:
            file.write(wrong)
        said[name] = refused(lambda name=name: TensorDict.from_mds(f"{folder}/{name}"))
    said["missing"] = refused(lambda: TensorDict.from_mds(f"{folder}/nothing"))
    return said


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
