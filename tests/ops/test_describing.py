"""`describe`: statistics against pandas, dtypes that torch sorts and counts differently, the table."""

from __future__ import annotations

import math
import pathlib
import pickle

import numpy as np
import pytest
import torch

from tensordict import NonTensorStack, TensorDict, UnbatchedTensor, lazy_stack
from tensordict.containers.summary import Summary


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64, torch.uint8, torch.int16])
def test_as_pandas_describes_a_column(dtype: torch.dtype) -> None:
    pandas = pytest.importorskip("pandas")
    torch.manual_seed(0)
    leaf = (torch.randn(1001) * 30).abs().to(dtype)
    if dtype.is_floating_point:
        leaf[::7] = math.nan
    found = TensorDict(a=leaf).describe(percentiles=[0.05, 0.5, 0.999])["a"]
    expected = pandas.Series(leaf.numpy()).astype(np.float64 if dtype.is_floating_point else leaf.numpy().dtype)
    for name, value in expected.describe(percentiles=[0.05, 0.5, 0.999]).items():
        assert found[name].item() == pytest.approx(value, rel=1e-12), name
    assert found["nan"].item() == pytest.approx(float(expected.isna().mean()))
    assert found["zero"].item() == pytest.approx(float((expected == 0).mean()))
    assert found["min"].dtype == found["max"].dtype == dtype
    assert found["count"].dtype == torch.int64 and found["mean"].dtype == found["50%"].dtype == torch.float64


def test_dtypes_that_are_no_plain_numbers() -> None:
    flags = torch.tensor([True, False, True, True])
    wide = torch.tensor([0, 2**64 - 1], dtype=torch.uint64)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    summary = TensorDict(
        flags=flags,
        wide=wide,
        nested=nested,
        z=torch.tensor([3 + 4j, -3 - 4j, 0]),
        half=torch.tensor([1, 2]).bfloat16(),
    ).describe()
    assert summary["flags", "mean"] == 0.75 and summary["flags", "min"].dtype == torch.bool
    assert summary["flags", "25%"] == 0.75 and summary["flags", "zero"] == 0.25
    assert summary["wide", "max"].item() == 2**64 - 1 and summary["wide", "zero"] == 0.5
    assert summary["nested", "count"] == 5 and summary["nested", "mean"].item() == pytest.approx(0.4)
    assert summary["z", "mean"].item() == pytest.approx(0) and summary["z", "std"].item() == pytest.approx(5)
    assert list(summary["z"].keys()) == ["count", "mean", "std", "nan", "zero"]
    assert summary["half", "50%"] == 1.5 and summary["half", "max"].dtype == torch.bfloat16
    bytes8 = TensorDict(a=torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)).describe()
    assert bytes8["a", "75%"] == 1.75 and bytes8["a", "max"].dtype == torch.float8_e4m3fn


def test_infinite_missing_and_no_elements() -> None:
    inf = math.inf
    summary = TensorDict(
        inf=torch.tensor([-inf, 1.0, inf, inf]),
        nan=torch.tensor([math.nan] * 2),
        none=torch.zeros(0, 3),
        one=torch.ones(1),
    ).describe()
    assert summary["inf", "max"] == inf and summary["inf", "min"] == -inf and summary["inf", "75%"] == inf
    assert math.isnan(summary["inf", "mean"]) and math.isnan(summary["inf", "std"])
    assert summary["nan", "count"] == 0 and summary["nan", "nan"] == 1 and math.isnan(summary["nan", "50%"])
    assert summary["none", "count"] == 0 and all(math.isnan(summary["none", k]) for k in ("mean", "min", "nan", "zero"))
    assert summary["one", "mean"] == 1 and math.isnan(summary["one", "std"])


def test_members_of_unequal_shapes_and_values() -> None:
    shared = torch.arange(4.0)
    stack = lazy_stack([TensorDict(a=torch.ones(n), s="x", u=UnbatchedTensor(shared)) for n in (2, 3)])
    summary = stack.describe()
    assert set(summary.keys()) == {"a", "s", "u"} and summary["a", "count"] == 5 and summary["u", "count"] == 4
    assert not TensorDict(s=None).describe().keys() and "Summary(" in repr(TensorDict(s=None).describe())


def test_texts_are_counted() -> None:
    td = TensorDict({"s": NonTensorStack("b", "a", "b"), "n": {"t": "walk"}, "o": NonTensorStack(1, "a", None)}, [3])
    summary = td.describe()
    assert summary["s", "count"] == 3 and summary["s", "unique"] == 2 and "o" not in summary.keys()
    assert list(summary["s", "counts"].items()) == [("b", 2), ("a", 1)] and summary["n", "t", "counts"] == {"walk": 3}
    assert repr(summary) == "s: 'b': 2, 'a': 1\nn.t: 'walk'"
    both = td.set("x", torch.ones(3)).describe()
    assert repr(both).splitlines()[1:] == [
        "x      3     1    0    1    1    1    1    1    0     0",
        "s: 'b': 2, 'a': 1",
        "n.t: 'walk'",
    ]
    html = both._repr_mimebundle_()["text/html"]
    assert html is not None and "<div>s: &#x27;b&#x27;: 2, &#x27;a&#x27;: 1</div>" in html
    assert TensorDict(s="x", batch_size=[10**12]).describe()["s", "counts"] == {"x": 10**12}
    assert str(TensorDict(s=NonTensorStack(), batch_size=[0]).describe()).startswith("Summary(")


def test_percentiles_are_checked() -> None:
    td = TensorDict(a=torch.arange(11))
    assert list(td.describe([0.999, 0.07])["a"].keys())[4:6] == ["7%", "99.9%"]
    assert "50%" not in td.describe(())["a"]
    with pytest.raises(ValueError, match=r"between 0 and 1.*\[25\]"):
        td.describe([25, 0.5])
    with pytest.raises(ValueError, match="once each"):
        td.describe([0.5, 0.5])


def test_the_error_names_the_key() -> None:
    with pytest.raises(NotImplementedError, match="entry \\('a', 'b'\\)"):
        TensorDict(a={"b": torch.zeros(3, device="meta")}).describe()


def test_a_summary_is_a_container(tmp_path: pathlib.Path) -> None:
    summary = TensorDict(a=torch.arange(4.0), b={"<c>": torch.ones(3)}).describe()
    assert isinstance(summary["b"], Summary) and "count" in str(summary["b"])
    assert str(pickle.loads(pickle.dumps(summary))) == str(summary)
    summary.memmap(tmp_path / "summary")
    loaded = TensorDict.load_memmap(tmp_path / "summary")
    assert type(loaded) is TensorDict and (loaded == summary.to_tensordict()).all()
    # Several tables in one container print as a plain container.
    assert repr(torch.stack([summary, summary])).startswith("Summary(\n    fields={")
    shown = summary._repr_mimebundle_()
    assert shown["text/plain"] == str(summary)
    assert "<td>b.&lt;c&gt;</td><td>3</td>" in shown["text/html"] and "<th>75%</th>" in shown["text/html"]
    assert "Summary" in torch.stack([summary, summary])._repr_mimebundle_()["text/html"]
