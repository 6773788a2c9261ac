"""Transfers to a GPU and back, and calls on containers whose leaves lie there. Without a GPU there are none."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from workload import Context, State, Workload, build, flat, tree_map

MIB = 1 << 20
CUDA = torch.device("cuda", 0)


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family. Each waits until the GPU has finished."""
    if not torch.cuda.is_available():
        return []
    megabytes = 1 if context.quick else 64
    return [
        *(
            workload
            for label, data in (
                ("100 x 4 KiB", flat(100, 32, 32)),
                (f"8 x {megabytes} MiB", flat(8, megabytes, MIB // 4)),
            )
            for workload in _transfers(label, data)
        ),
        *_on_the_gpu(),
        _replay(),
    ]


def _transfers(label: str, data: dict[str, Any]) -> list[Workload]:
    size = sum(leaf.nbytes for leaf in data.values())

    def made_of(place: Callable[[Tensor], Tensor]) -> Callable[[ModuleType], State]:
        def setup(package: ModuleType) -> State:
            ours, raw = tree_map(place, data), tree_map(place, data)
            return SimpleNamespace(td=package.TensorDict(ours, []), data=raw)

        return setup

    pageable, pinned, there = made_of(Tensor.clone), made_of(Tensor.pin_memory), made_of(lambda leaf: leaf.to(CUDA))

    def consolidate(package: ModuleType) -> State:
        buffer = torch.cat([leaf.view(-1) for leaf in data.values()]).pin_memory()
        return SimpleNamespace(td=package.TensorDict(data, []).consolidate(pin_memory=True), buffer=buffer)

    def send(state: State) -> Any:
        return _finish(state.td.to(CUDA))

    def send_leaves(state: State) -> Any:
        return _finish(tree_map(lambda leaf: leaf.to(CUDA, non_blocking=True), state.data))

    def send_buffer(state: State) -> Any:
        pieces = state.buffer.to(CUDA, non_blocking=True).split([leaf.numel() for leaf in data.values()])
        views = (piece.view(leaf.shape) for piece, leaf in zip(pieces, data.values(), strict=True))
        return _finish(dict(zip(data, views, strict=True)))

    return [
        Workload(f"to(cuda), {label}", pageable, send, send_leaves, payload_bytes=size),
        Workload(f"to(cuda), pinned, {label}", pinned, send, send_leaves, payload_bytes=size),
        Workload(
            f"to(cuda, non_blocking=True), pinned, {label}",
            pinned,
            lambda s: _finish(s.td.to(CUDA, non_blocking=True)),
            send_leaves,
            payload_bytes=size,
        ),
        Workload(
            f"to(cuda), consolidated and pinned, {label}",
            consolidate,
            send,
            send_buffer,
            payload_bytes=size,
        ),
        Workload(
            f"pin_memory(), {label}",
            pageable,
            lambda s: s.td.pin_memory(),
            lambda s: tree_map(Tensor.pin_memory, s.data),
            payload_bytes=size,
        ),
        Workload(
            f"to(cpu), {label}",
            there,
            lambda s: s.td.to("cpu"),
            lambda s: tree_map(Tensor.cpu, s.data),
            payload_bytes=size,
        ),
    ]


def _on_the_gpu() -> list[Workload]:
    data = {key: leaf.to(CUDA) for key, leaf in flat(20).items()}
    setup = build(data)

    def each(function: Callable[[Tensor], Tensor]) -> Callable[[State], Any]:
        return lambda s: _finish(tree_map(function, s.data))

    def each_list(function: Callable[[list[Tensor]], Any]) -> Callable[[State], Any]:
        return lambda s: _finish(dict(zip(s.data, function(list(s.data.values())), strict=True)))

    return [
        Workload("td + 1 on the GPU, 20 keys", setup, lambda s: _finish(s.td + 1), each_list(_add_one)),
        Workload("clone() on the GPU, 20 keys", setup, lambda s: _finish(s.td.clone()), each(Tensor.clone)),
        Workload("td[0] on the GPU, 20 keys", setup, lambda s: _finish(s.td[0]), each(lambda leaf: leaf[0])),
        Workload(
            "stack of 8 on the GPU, 20 keys",
            setup,
            lambda s: _finish(torch.stack([s.td] * 8)),
            each(lambda leaf: torch.stack([leaf] * 8)),
        ),
    ]


def _add_one(leaves: list[Tensor]) -> Any:
    return torch._foreach_add(leaves, 1)


def _replay() -> Workload:
    def setup(package: ModuleType) -> State:
        torch.manual_seed(0)
        modules = importlib.import_module(f"{package.__name__}.nn")
        module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]).to(CUDA).eval().requires_grad_(False)
        td = package.TensorDict({"x": torch.randn(32, 64, device=CUDA)}, [32], device=CUDA)
        call = modules.CudaGraphModule(modules.TensorDictModule(module, ["x"], ["y"]))
        for _ in range(8):
            call(td.copy())
        x = td["x"].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x)
        return SimpleNamespace(td=td, call=call, graph=graph, given=td["x"], x=x, y=y)

    def run(state: State) -> Any:
        return _finish(state.call(state.td.copy()))

    def floor(state: State) -> Any:
        state.x.copy_(state.given)
        state.graph.replay()
        return _finish({"x": state.given, "y": state.y.clone()})

    return Workload("CudaGraphModule, replayed", setup, run, floor)


def _finish(result: Any) -> Any:
    torch.cuda.synchronize()
    return result
