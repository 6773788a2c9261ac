"""The help texts and arguments of the commands, for the parser in `main.py`. Imports neither torch nor `tensordict`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

# A copy of the formats in `tensordict.io.formats.opening`: importing that module would import torch.
FORMATS = ("directory", "archive", "consolidated", "h5", "zarr", "safetensors")


def _parse_count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a number is 0 or more, got {text!r}")
    return int(text)


def _add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Print the tree of a save.

    Print what a save holds, of any format: its nested keys with dtypes, shapes and sizes, batch sizes, names of dims,
    the kinds of its containers, and the values that are not tensors. No tensor is read, nothing is unpickled, and the
    tensorclasses that it names need not be known. An entry that is broken is shown as such, with the reason on
    standard error, and the others are printed all the same; the command exits with 1 then.

    --key takes a pattern, too: * is any characters, dots among them, ? is one, [ab] is one of these. What is at the
    keys that match is printed, with the containers above. --stats reads the tensors that are shown, 8 MiB at a time,
    and prints how many elements each has, how many of them are NaN, infinite and zero, and the mean, standard
    deviation, least and greatest of the finite ones. --head reads the first N rows of each, along its first dim, and
    prints their first elements. On a terminal that is too small, the output goes through $PAGER (less by default).

    With --json, one object: "path", "format", "nbytes" (of all tensors), "bytes_on_disk" (the lengths of the files),
    "bytes_allocated" (what they take on the disk: less where they have holes, more for many small ones; null at a
    URL, as "bytes_on_disk" is where an HTTP server does not list what it has), "tensors", "values" and "containers"
    (their numbers), "problems" (one line for each broken entry), and "root", a node: of --key, if it is given. Every
    node has a "type":
      "tensor"      "dtype", "shape" (-1 for ragged dims), "nbytes", "ragged"
      "container"   "kind" (the class), "batch_size", "names" (or null), "stack_dim" (or null), "entries" (name -> node)
      "value"       "kind", "batch_size", "names", "stack_dim", "value" (null when JSON cannot hold it), "pickled"
      "broken"      "problem"
    With --depth, containers that are not gone into have no "entries". With --stats, tensors that are shown have
    "stats": "count", "mean", "std", "min", "max", "nan", "infinite" and "zero" (null for figures that do not exist,
    and for all of them if the dtype has no numbers); the mean of complex ones is a list of its two parts. With
    --head, tensors and values have "head", a list of the first rows, with null for elements that are not finite.

    examples:
      tensordict inspect runs/1
      tensordict inspect data.tdz | head -20
      tensordict inspect --depth 1 data.tdz
      tensordict inspect --key policy.params checkpoint
      tensordict inspect --key '*.weight' --stats checkpoint
      tensordict inspect --head 3 s3://bucket/dataset
      tensordict inspect --json data.tdz | jq .nbytes
    """
    parser.add_argument("path", metavar="PATH", help="the save: a folder, a file, or its URL")
    parser.add_argument(
        "--key", metavar="GLOB", help="print only the entry at this nested key, written with dots, or all that match"
    )
    parser.add_argument("--depth", type=_parse_count, metavar="N", help="print N levels of the tree (0: one line)")
    parser.add_argument("--stats", action="store_true", help="read the tensors, and print statistics of each")
    parser.add_argument("--head", type=_parse_count, metavar="N", help="print the first N rows of each tensor")
    parser.add_argument("--no-pager", action="store_true", help="print long output without a pager")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def _add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Check whether a save is whole.

    Check a save without loading it: its structure, the lengths of its files, and checksums where they were recorded
    (see convert --checksum; archives always have them). Of a Zarr group, each chunk that was written is there, and
    all are decoded. Nothing is unpickled, and the tensorclasses need not be known. Exits with 0 when it is sound, 1
    when there are problems, 2 when it is missing or of no format that is known.

    With --json, one object: "path", "format", "ok", "tensors" and "nbytes" (of all tensors), "checksummed" (how many
    of them were compared with a checksum) and "problems", a list of lines.

    examples:
      tensordict verify runs/1
      tensordict verify --num-threads 4 data.tdz || echo broken
      tensordict verify --json data.h5 | jq -r '.problems[]'
    """
    parser.add_argument("path", metavar="PATH", help="the save: a folder, a file, or its URL")
    parser.add_argument("--num-threads", type=int, default=0, metavar="N", help="the number of threads that read")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def _add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Write a save, or a table, in another format.

    Write a save again, in the same or in another format: a folder, an archive (.tdz), a consolidated file
    (.consolidated), HDF5 (.h5, .hdf5), Zarr (.zarr) or safetensors (.safetensors). The suffix of DST says which, no
    suffix means a folder. Tensors are mapped and written piece by piece, so that memory does not limit the size. On a
    terminal, progress is shown.

    Tables (.parquet, .csv, .json, .jsonl, .ndjson; pip install 'tensordict[tabular]') become a data set that grows, a
    folder that open_dataset opens, and saves and data sets become tables: a row for each element of the first batch
    dim, some rows in memory at a time. SRC may be a pattern ('part-*.parquet', in quotes) or a URL. Names of columns
    are split at dots.

    examples:
      tensordict convert runs/1 run.tdz
      tensordict convert --compression deflate runs/1 small.tdz
      tensordict convert --checksum crc32 run.h5 runs/1
      tensordict convert --import my_project.data runs/1 run.h5
      tensordict convert big.parquet dataset
      tensordict convert 's3://bucket/logs-*.jsonl' dataset
      tensordict convert --fill age=0 --fill size=nan people.csv dataset
      tensordict convert --nulls mask gaps.parquet dataset
      tensordict convert dataset rows.csv
      tensordict convert --to directory --force run.safetensors runs/1
    """
    parser.add_argument("source", metavar="SRC", help="the save, of any format, or a table")
    parser.add_argument("target", metavar="DST", help="where to write it")
    parser.add_argument("--to", choices=(*FORMATS, "dataset"), help="the format of DST, whatever its suffix")
    parser.add_argument("--force", action="store_true", help="replace DST if it exists")
    parser.add_argument(
        "--compression",
        help="the compression of an archive (deflate, bzip2, lzma), HDF5 (gzip, lzf) or Zarr (gzip, zstd, blosc)",
    )
    parser.add_argument(
        "--checksum", choices=("crc32", "sha256", "blake2b"), help="record a checksum per tensor, for verify"
    )
    parser.add_argument(
        "--fill",
        action="append",
        default=[],
        metavar="[COLUMN=]VALUE",
        help="the number for missing values of a table SRC, in all columns or in one (may be given again)",
    )
    parser.add_argument(
        "--nulls",
        choices=("mask",),
        help="add entries NAME_mask, false for missing values of a table SRC; leave masked values of a table DST out",
    )
    parser.add_argument("--num-threads", type=int, default=0, metavar="N", help="the number of threads that write")
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this module first, because it defines tensorclasses of SRC (may be given again)",
    )
    parser.add_argument("--allow-pickle", action="store_true", help="unpickle values of SRC, which can run any code")


def _add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    """Compare two saves.

    Compare two saves, which may be of different formats, or data sets: keys, kinds of containers, batch sizes, names
    of dims, dtypes, shapes, values, and then the elements of the tensors, piece by piece; not how a data set is cut
    into shards. Exits with 0 when they are the same, 1 when they differ, 2 when one cannot be read.

    With --json, one object: "same" (true or false) and "differences", each with "key" (a list of names), "what"
    ("missing" in B, "additional" in B, "kind", "batch size", "names", "stack dim", "dtype", "shape", "value" or
    "elements") and what it is in "a" and in "b". For "elements" there are "differing" (how many), "of" (how many
    there are) and "max_abs" (the largest absolute difference, null if it is not finite) instead.

    examples:
      tensordict diff runs/1 runs/2
      tensordict diff --rtol 1e-5 --equal-nan checkpoint.tdz checkpoint.h5
      tensordict diff --json a b > differences.json || echo they differ
    """
    parser.add_argument("a", metavar="A", help="a save")
    parser.add_argument("b", metavar="B", help="a second save, in any format")
    parser.add_argument("--rtol", type=float, default=0.0, help="relative tolerance for elements (default 0)")
    parser.add_argument("--atol", type=float, default=0.0, help="absolute tolerance for elements (default 0)")
    parser.add_argument("--equal-nan", action="store_true", help="treat NaN as equal to NaN")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Write a page that shows the content of a save.

    Write one page of HTML on what a save or a data set holds, of any format, or on how two compare: structure, sizes,
    findings (NaN, infinite and constant elements), a histogram and figures of each tensor, thumbnails of images,
    values, the first rows. It needs no other file and runs no script (pip install 'tensordict[report]', which has
    Matplotlib).

    Tensors of compressed archives, ragged tensors and tensors at URLs are read one by one, all other tensors in
    pieces of 8 MiB. With --sample, such pieces are taken at equal distances, and the page says so. Nothing is
    unpickled, and tensorclasses need not be known. A report that is at FILE is replaced, anything else only with
    --force. An entry that is broken is reported as such, and the command exits with 1 then.

    examples:
      tensordict report runs/1
      tensordict report runs/1 runs/2 -o compared.html
      tensordict report --sample 64 s3://bucket/data -o data.html
    """
    parser.add_argument("path", metavar="PATH", help="the save or the data set: a folder, a file, or its URL")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="a second one, to compare with the first")
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="report.html", help="where to write the page (default report.html)"
    )
    parser.add_argument(
        "--sample", type=_parse_count, default=0, metavar="MIB", help="read about MIB MiB of each tensor (default: all)"
    )
    parser.add_argument("--force", action="store_true", help="replace FILE, even if it is not a report")


def _add_compact_arguments(parser: argparse.ArgumentParser) -> None:
    """Merge the small shards of a data set.

    Merge shards of a data set that follow one another into larger ones: the rows stay the same, in the same order.
    Each new shard takes the place of the old ones in one step, which are removed then. Writers may go on writing and
    readers reading meanwhile; one command at a time compacts or tidies. Prints how many shards there were, and how
    many there are.

    examples:
      tensordict compact data
      tensordict compact --rows 1000000 --format archive data
    """
    parser.add_argument("path", metavar="PATH", help="the folder of the data set, or its URL")
    parser.add_argument("--rows", type=int, metavar="N", help="the rows of each shard (default: 128 MiB of rows)")
    parser.add_argument(
        "--format",
        choices=("folder", "archive", "zarr"),
        default="",
        help="the format of new shards (default: as the first shard)",
    )
    parser.add_argument(
        "--durable",
        action=argparse.BooleanOptionalAction,
        help="flush new shards to the disk before they count (default: yes for folders and archives on a disk)",
    )
    parser.add_argument("--keep", action="store_true", help="leave the old shards for tidy to remove")


def _add_tidy_arguments(parser: argparse.ArgumentParser) -> None:
    """Remove what killed writers of a data set left.

    Remove incomplete shards of writers that are gone, and shards that a compaction has replaced and verified. Shards
    that count are never touched. Nothing is removed while a manifest is damaged or missing. A complete shard that no
    manifest lists is removed only when --remove names it: its writer was killed before it counted, or its line was
    lost. Prints the paths that were removed, and on standard error the paths that it left, with the reasons.

    examples:
      tensordict tidy data
      tensordict tidy --older-than 60 --remove data/shards/WRITER/00000007 data
    """
    parser.add_argument("path", metavar="PATH", help="the folder of the data set, or its URL")
    parser.add_argument(
        "--older-than",
        type=float,
        default=3600.0,
        metavar="S",
        help="remove only files that did not change for S seconds (default 3600)",
    )
    parser.add_argument(
        "--remove", action="append", default=[], metavar="SHARD", help="also remove this shard, which no manifest lists"
    )


def _add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Tell what this machine and this installation can do.

    Print the versions of Python, torch, NumPy and this package, what is there of each extra and how to install the
    rest, the GPUs, what the file system of a folder can do (a few small files are made there, and removed), and what
    the environment allows: processors, memory, limits, ways to start processes, what the kernel tells about memory.
    Exits with 1 when something that the package promises cannot work here, which is said last.

    With --json, one object: "versions", "extras" (of each its "packages" with their versions, or null, and "install",
    the command to install it, or null), "gpus", "path" (of its "features" null for what works, else why it does not),
    "environment" and "problems", a list of lines.

    examples:
      tensordict doctor
      tensordict doctor /mnt/shared/runs
      tensordict doctor --json | jq .extras
    """
    parser.add_argument("path", metavar="PATH", nargs="?", default=".", help="the folder to try (default: this one)")
    parser.add_argument("--no-pager", action="store_true", help="print long output without a pager")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def _add_ifeval_arguments(parser: argparse.ArgumentParser) -> None:
    """Score how responses follow instructions.

    Score responses with the instruction checkers of EleutherAI's lm-evaluation-harness (pip install
    'tensordict[ifeval]') and print the accuracies over prompts, over instructions, and per type of instruction:
    strict, and loose (asterisks, the first and the last line may be left out). Needs no network; two types of
    instructions need NLTK's punkt_tab (python -m nltk.downloader punkt_tab), which is said beforehand when it is
    missing. Responses that cannot be scored are in no accuracy; standard error says why, one per line, and the
    command exits with 1 when there are any, else with 0.

    RESPONSES has one JSON object per line, with "prompt" and "response". PROMPTS has one per line, with "prompt",
    "instruction_id_list" and "kwargs", as the public data set has them; without PROMPTS, the lines of RESPONSES have
    these too.

    With --json, one object: "prompts" and "instructions" (how many were scored), "prompt_errors" and "inst_errors"
    (how many could not be), the accuracies "prompt_level_strict_acc", "inst_level_strict_acc",
    "prompt_level_loose_acc" and "inst_level_loose_acc" as fractions (null when there are none), "types", which has
    "strict_acc", "loose_acc", "instructions" and "inst_errors" for the id of every type, and "errors", a list of
    lines. With --per-prompt, "responses", too: of each its "place" (file and line), whether it follows all, "strict"
    and "loose" (true, false, or null when it could not be scored), and its "instructions", each with "id", "strict"
    and "loose".

    examples:
      tensordict ifeval responses.jsonl --prompts input_data.jsonl
      tensordict ifeval --json responses.jsonl | jq .prompt_level_strict_acc
    """
    parser.add_argument("responses", metavar="RESPONSES", help="the responses, as JSON lines")
    parser.add_argument("--prompts", metavar="PROMPTS", help="the prompts, as JSON lines")
    parser.add_argument("--per-prompt", action="store_true", help="also show the scores of each response")
    parser.add_argument("--num-workers", type=int, default=0, metavar="N", help="the number of processes that score")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


# The functions that add the arguments of each command. Their docstrings are its help: a line for the list of commands,
# a description, and examples. The module of the same name in `tensordict_cli.runners` runs it with its function `run`.
COMMANDS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "inspect": _add_inspect_arguments,
    "verify": _add_verify_arguments,
    "convert": _add_convert_arguments,
    "diff": _add_diff_arguments,
    "report": _add_report_arguments,
    "compact": _add_compact_arguments,
    "tidy": _add_tidy_arguments,
    "doctor": _add_doctor_arguments,
    "ifeval": _add_ifeval_arguments,
}
