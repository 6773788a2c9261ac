"""Padding and packing for language models, in tokens a second: this package, TRL, verl, and their steps by hand.

    PYTHONPATH=/tmp/rivals .venv/bin/python benchmarks/packing.py [--rounds 11] [--sequences 512] [--max-tokens 8192]

Rivals that are not installed are left out: `pip install --no-deps --target /tmp/rivals trl transformers accelerate
tokenizers huggingface_hub verl omegaconf antlr4-python3-runtime==4.9.3 codetiming hydra-core einops`. The steps by hand
are written here after the documented behaviour of both packages, and run always.

Each call runs once in each round, in turns, on one thread. The medians of the processor time count, so that other
processes matter less. All start with the tokens in the form that they take: containers of tensors (here), Arrow (TRL),
one padded batch with a mask (verl). The time to make that form is not counted. Every result is compared with the
sequences.
"""

from __future__ import annotations

import argparse
import heapq
import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensordict import TensorDict, pack_sequences, pad_sequence, unpack_sequences

PAD = {"input_ids": 7, "labels": -100, "mask": 0}
SIDES = {"input_ids": "left", "labels": "right", "mask": "left"}


def make_sequences(count: int) -> list[TensorDict]:
    """Return sequences of 16 to 2047 tokens, most of them short, as of chats."""
    torch.manual_seed(0)
    lengths = torch.rand(count).pow(3).mul(2032).add(16).long().tolist()
    return [
        TensorDict(
            input_ids=torch.randint(100, 32000, (n,)), labels=torch.randint(100, 32000, (n,)), mask=torch.ones(n).long()
        )
        for n in lengths
    ]


# --- padding ----------------------------------------------------------------------------------------------------------


def pad_by_hand(tensors: list[Tensor], value: int, side: str, multiple: int) -> Tensor:
    """Fill a tensor row by row, as the collators of TRL do for each entry."""
    longest = max(map(len, tensors))
    out = torch.full((len(tensors), -(-longest // multiple) * multiple), value, dtype=tensors[0].dtype)
    for row, tensor in zip(out, tensors, strict=True):
        part = row[len(row) - len(tensor) :] if side == "left" else row[: len(tensor)]
        part.copy_(tensor)
    return out


def padders(sequences: list[TensorDict]) -> dict[str, Callable[[], dict[str, Tensor]]]:
    """Return the ways to make batches of 64 sequences."""
    batches = [sequences[at : at + 64] for at in range(0, len(sequences), 64)]
    columns = [{key: [one[key] for one in batch] for key in PAD} for batch in batches]

    def ours() -> Any:
        return [
            pad_sequence(batch, padding_value=PAD, padding_side=SIDES, pad_to_multiple_of=64)  # type: ignore[arg-type]
            for batch in batches
        ]

    def by(fn: Callable[..., Tensor]) -> Any:
        return lambda: [{key: fn(batch[key], PAD[key], SIDES[key], 64) for key in PAD} for batch in columns]

    found = {"pad_sequence": ours, "by hand": by(pad_by_hand)}
    if importlib.util.find_spec("trl"):
        from trl.trainer.utils import pad  # type: ignore[import-not-found]

        found["TRL"] = by(pad)
    return found


# --- packing ----------------------------------------------------------------------------------------------------------


def flatten_row(ids: Any, labels: Any, lengths: list[int]) -> dict[str, Any]:
    """Return what the padding-free collator of TRL makes of one row, and the cumulative lengths for flash attention."""
    return {
        "input_ids": torch.as_tensor(ids),
        "labels": torch.as_tensor(labels),
        "position_ids": torch.cat([torch.arange(n) for n in lengths]),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
        "max_seqlen": max(lengths),
    }


def pack_by_hand(sequences: list[TensorDict], most: int) -> list[dict[str, Any]]:
    """Pack by first-fit decreasing, and concatenate row by row."""
    rows: list[list[TensorDict]] = []
    free: list[int] = []
    for one in sorted(sequences, key=lambda one: -one["input_ids"].numel()):
        n = one["input_ids"].numel()
        at = next((at for at, space in enumerate(free) if space >= n), len(free))
        if at == len(free):
            rows.append([])
            free.append(most)
        rows[at].append(one)
        free[at] -= n
    return [
        flatten_row(
            torch.cat([one["input_ids"] for one in row]),
            torch.cat([one["labels"] for one in row]),
            [one["input_ids"].numel() for one in row],
        )
        for row in rows
    ]


def split_by_hand(padded: TensorDict, most: int) -> list[list[int]]:
    """Assign sequences to balanced micro-batches, the longest first, each to the one with the fewest tokens."""
    lengths = padded["attention_mask"].sum(1).tolist()
    heap: list[tuple[int, int, list[int]]] = [(0, at, []) for at in range(math.ceil(sum(lengths) / most))]
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        total, at, numbers = heapq.heappop(heap)
        heapq.heappush(heap, (total + lengths[number], at, [*numbers, number]))
    return [numbers for _, _, numbers in heap]


def unpad_by_hand(micro: Any) -> dict[str, Any]:
    """Remove the padding of a micro-batch, as the actor of verl does before its model is called."""
    mask = micro["attention_mask"]
    lengths = mask.sum(1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    out = {key: micro[key].flatten()[indices] for key in ("input_ids", "labels", "position_ids")}
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return {**out, "indices": indices, "cu_seqlens": cu_seqlens, "max_seqlen": int(lengths.max())}


def pad_back_by_hand(rows: list[dict[str, Any]], plan: list[list[int]], padded: TensorDict) -> Tensor:
    """Put the values of tokens back into a padded batch in the first order, as verl does behind its model."""
    width = padded["attention_mask"].shape[1]
    parts = []
    for row, numbers in zip(rows, plan, strict=True):
        part = torch.zeros(len(numbers) * width, dtype=row["labels"].dtype)
        part[row["indices"]] = row["labels"]
        parts.append(part.view(len(numbers), width))
    order = torch.tensor([number for numbers in plan for number in numbers])
    return torch.cat(parts)[order.argsort()]


def make_padded(sequences: list[TensorDict]) -> TensorDict:
    """Return the batch that verl starts with."""
    padded: Any = pad_sequence(
        [one.select("input_ids", "labels").set("attention_mask", one["mask"]) for one in sequences]
    )
    return padded.set("position_ids", (padded["attention_mask"].cumsum(1) - 1).clamp_min(0))  # type: ignore[no-any-return]


def packers(
    sequences: list[TensorDict], most: int
) -> tuple[dict[str, Callable[[], Any]], dict[str, Callable[[], Any]]]:
    """Return the ways to pack sequences into rows, and the ways back to one tensor or list for each sequence."""
    plain = [one.select("input_ids", "labels") for one in sequences]
    padded = make_padded(sequences)
    rows = pack_sequences(plain, most)
    plan = split_by_hand(padded, most)

    def verl_by_hand() -> Any:
        return [unpad_by_hand(padded[numbers]) for numbers in split_by_hand(padded, most)]

    unpadded = [unpad_by_hand(padded[numbers]) for numbers in plan]
    found: dict[str, Callable[[], Any]] = {
        "pack_sequences": lambda: pack_sequences(plain, most),
        "TRL's way by hand": lambda: pack_by_hand(plain, most),
        "verl's way by hand": verl_by_hand,
    }
    back: dict[str, Callable[[], Any]] = {
        "unpack_sequences": lambda: unpack_sequences(rows),
        "verl's way by hand": lambda: pad_back_by_hand(unpadded, plan, padded),
    }
    if importlib.util.find_spec("trl"):
        found["TRL"] = _trl(plain, most)
    if importlib.util.find_spec("verl"):
        found["verl"], back["verl"] = _verl(padded, most)
    return found, back


def _trl(plain: list[TensorDict], most: int) -> Callable[[], Any]:
    from trl import pack_dataset

    from datasets import Dataset, disable_caching, disable_progress_bars  # type: ignore[import-not-found]

    disable_progress_bars()
    disable_caching()
    stored = Dataset.from_dict({key: [one[key].tolist() for one in plain] for key in ("input_ids", "labels")})

    def run() -> Any:
        packed = pack_dataset(stored, most, "bfd").with_format("torch")
        return [flatten_row(row["input_ids"], row["labels"], row["seq_lengths"].tolist()) for row in packed]

    return run


def _verl(padded: TensorDict, most: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    from verl.utils.attention_utils import (  # type: ignore[import-not-found]
        index_first_axis,
        pad_input,
        rearrange,
        unpad_input,
    )
    from verl.utils.seqlen_balancing import (  # type: ignore[import-not-found]
        get_reverse_idx,
        rearrange_micro_batches,
    )

    def unpad(micro: Any) -> dict[str, Any]:
        ids, indices, ends, longest = unpad_input(micro["input_ids"].unsqueeze(-1), micro["attention_mask"])[:4]
        rest = {
            key: index_first_axis(rearrange(micro[key].unsqueeze(-1), "b s ... -> (b s) ..."), indices).squeeze(-1)
            for key in ("labels", "position_ids")
        }
        return {"input_ids": ids.squeeze(-1), **rest, "indices": indices, "cu_seqlens": ends, "max_seqlen": longest}

    def run() -> Any:
        return [unpad(micro) for micro in rearrange_micro_batches(padded, most)[0]]

    micros, plan = rearrange_micro_batches(padded, most)
    rows = [unpad(micro) for micro in micros]
    width = padded["attention_mask"].shape[1]

    def back() -> Any:
        parts = [
            pad_input(row["labels"].unsqueeze(-1), row["indices"], len(numbers), width).squeeze(-1)
            for row, numbers in zip(rows, plan, strict=True)
        ]
        return torch.cat(parts)[torch.tensor(get_reverse_idx([number for numbers in plan for number in numbers]))]

    return run, back


# --- measuring --------------------------------------------------------------------------------------------------------


def check_rows(name: str, rows: Any, sequences: list[TensorDict], most: int) -> str:
    """Compare the tokens, positions and lengths of rows with those of the sequences; return how full the rows are."""
    tokens, lengths, sizes = 0, [], []
    for row in rows:
        ids = row["tokens"]["input_ids"] if "tokens" in row.keys() else row["input_ids"]
        each = row["cu_seqlens"].diff().tolist()
        if row["cu_seqlens"].dtype != torch.int32 or row["max_seqlen"] != max(each) or sum(each) != len(ids):
            raise AssertionError(f"{name}: lengths of a row are wrong")
        if not torch.equal(row["position_ids"], torch.cat([torch.arange(n) for n in each])):
            raise AssertionError(f"{name}: positions are wrong")
        tokens += int(ids.sum())
        lengths += each
        sizes.append(len(ids))
    if sorted(lengths) != sorted(one["input_ids"].numel() for one in sequences):
        raise AssertionError(f"{name}: the rows have other sequences")
    if tokens != sum(int(one["input_ids"].sum()) for one in sequences):
        raise AssertionError(f"{name}: the rows have other tokens")
    return f"{len(sizes)} rows, the longest of {max(sizes)} tokens (of {most})"


def measure(title: str, calls: dict[str, Callable[[], Any]], tokens: int, rounds: int, notes: dict[str, str]) -> None:
    """Run the calls in turns, and print tokens a second."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.process_time()
            result = call()
            took = time.process_time() - start
            del result
            if number:  # the first round warms up
                seconds[name].append(took)
    print(title)
    first = statistics.median(next(iter(seconds.values())))
    for name, found in seconds.items():
        median = statistics.median(found)
        print(
            f"  {name:20} {tokens / median / 1e6:8.1f} M tokens/s  {median / first:6.2f} x time  {notes.get(name, '')}"
        )


def main() -> None:
    """Check and measure all ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=8192)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sequences = make_sequences(options.sequences)
    tokens = sum(one["input_ids"].numel() for one in sequences)
    print(f"{len(sequences)} sequences, {tokens:,} tokens, torch {torch.__version__}")
    pads = padders(sequences)
    ours = pads["pad_sequence"]()
    for name, call in pads.items():
        for one, batch in zip(ours, call(), strict=True):  # type: ignore[call-overload]
            if not all(torch.equal(one[key], batch[key]) for key in PAD):
                raise AssertionError(f"{name}: another batch")
    measure("pad 3 entries on both sides, in batches of 64", pads, tokens, options.rounds, {})
    found, back = packers(sequences, options.max_tokens)
    notes = {name: check_rows(name, call(), sequences, options.max_tokens) for name, call in found.items()}
    measure("pack 2 entries", found, tokens, options.rounds, notes)
    for name, call in back.items():
        for number, (one, given) in enumerate(zip(call(), sequences, strict=True)):
            labels = one["labels"] if name == "unpack_sequences" else one[: len(given["labels"])]
            if not torch.equal(labels, given["labels"]):
                raise AssertionError(f"{name}: sequence {number} has other labels")
    measure("back to sequences", back, tokens, options.rounds, {})


if __name__ == "__main__":
    main()
