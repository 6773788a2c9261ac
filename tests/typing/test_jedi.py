"""Completion in editors that use Jedi, such as IPython, Jupyter and Vim: it knows the class of common results."""

from __future__ import annotations

import jedi
import pytest

PROGRAM = """
import torch
from tensordict import TensorClass, TensorDict

class Step(TensorClass):
    obs: torch.Tensor

td = TensorDict(a=torch.ones(3), batch_size=[3])
steps = Step(obs=torch.ones(3), batch_size=[3])
"""
RESULTS = [
    "[0]",
    "[:2]",
    "[...,None]",
    ".to(1)",
    '.to("cpu")',
    ".cpu()",
    ".cuda()",
    ".float()",
    ".detach()",
    ".data",
    ".clone()",
    ".copy()",
    ".contiguous()",
    ".pin_memory()",
    ".reshape(3)",
    ".view(3)",
    ".unsqueeze(0)",
    ".permute(0)",
    ".expand(2,3)",
    ".unbind(0)[0]",
    ".split(1)[0]",
    ".chunk(1)[0]",
    ".mean(0)",
    ".gather(0,i)",
    '.select("obs")',
    '.exclude("obs")',
    '.set("obs",1)',
    ".update({})",
    ".empty()",
    ".lock_()",
    ".unflatten_keys()",
    ".apply(abs)",
    ".where(m,0)",
    ".memmap_()",
    '.memmap("folder")',
    '.load_memmap("folder")',
    ".abs()",
    " - 1",
    " ** 2",
    ".from_dict({})",
    ".consolidate()",
    "[0].to(1).reshape(1)[0].clone()",
    "[1:].cpu().float()",
]


@pytest.mark.seconds
@pytest.mark.parametrize(("name", "kind"), [("td", "TensorDict"), ("steps", "Step")])
def test_results_have_the_class_of_the_container(name: str, kind: str) -> None:
    results = [*RESULTS, *([".from_tensordict(td)"] if name == "steps" else [])]
    lines = [f"r{number} = {name}{result}" for number, result in enumerate(results)]
    script = jedi.Script(PROGRAM + "\n".join(lines))
    start = PROGRAM.count("\n") + 1
    found = {result: [value.name for value in script.infer(start + number, 0)] for number, result in enumerate(results)}
    assert {result: names for result, names in found.items() if kind not in names} == {}


@pytest.mark.seconds
@pytest.mark.parametrize("call", ["[0]", ".to(1)"])
def test_completion_lists_methods_and_fields(call: str) -> None:
    names = {item.name for item in jedi.Script(f"{PROGRAM}steps{call}.").complete()}
    assert {"obs", "batch_size", "memmap", "reshape"} <= names
    assert [item.name for item in jedi.Script(f"{PROGRAM}td{call}.mem").complete()][:1] == ["memmap"]


@pytest.mark.seconds
def test_help_shows_the_method() -> None:
    """And not what stands for it below."""
    (signature,) = jedi.Script(f"{PROGRAM}td.clone(").get_signatures()
    assert signature.params[0].name == "recurse" and "clone" in signature.name and signature.docstring()
