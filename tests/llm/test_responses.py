"""The files of IFEval, and the command `tensordict ifeval` over them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tensordict.llm.responses import read_responses
from tensordict_cli.runners import main

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "ifeval"
ARGUMENTS = [str(EXAMPLE / "responses.jsonl"), "--prompts", str(EXAMPLE / "prompts.jsonl")]

# Two prompts; the first has two instructions.
PROMPTS = [
    {
        "key": 7,
        "prompt": "Say hello.",
        "instruction_id_list": ["punctuation:no_comma", "detectable_format:title"],
        "kwargs": [{}, {}],
    },
    {
        "key": 8,
        "prompt": "Say goodbye.",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{"num_words": None}],
    },
]
RESPONSES = [
    {"prompt": "Say goodbye.", "response": "Bye."},
    {"prompt": "Say hello.", "response": "Hello, you.\n<<Hello>>"},
]


def written(path: Path, lines: list[Any]) -> str:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return written(tmp_path / "prompts.jsonl", PROMPTS)


class TestFiles:
    def test_matched_by_prompt(self, tmp_path: Path, prompts: str) -> None:
        responses = written(tmp_path / "responses.jsonl", ["\n", *RESPONSES])
        data, places = read_responses(responses, prompts)
        assert places == [f"{responses}:2", f"{responses}:3"]
        assert data.batch_size == (2,) and data[0]["key"] == 8 and data[1]["key"] == 7
        assert data[1]["instruction_id_list"] == PROMPTS[0]["instruction_id_list"]
        assert data[0]["kwargs"] == [{"num_words": None}] and data[0]["response"] == "Bye."

    def test_all_in_one_file(self, tmp_path: Path) -> None:
        lines = [{**PROMPTS[1], "response": "Bye."}, {**PROMPTS[0], "response": "Hi."}]
        data, _ = read_responses(written(tmp_path / "all.jsonl", lines))
        assert [row["response"] for row in data.unbind(0)] == ["Bye.", "Hi."]
        assert data[0]["instruction_id_list"] == ["punctuation:no_comma"]

    def test_several_responses_to_a_prompt(self, tmp_path: Path, prompts: str) -> None:
        responses = written(tmp_path / "responses.jsonl", [*RESPONSES, *RESPONSES])
        assert read_responses(responses, prompts)[0].batch_size == (4,)

    def test_prompts_without_a_response_come_last(self, tmp_path: Path, prompts: str) -> None:
        data, places = read_responses(written(tmp_path / "responses.jsonl", RESPONSES[:1]), prompts)
        assert places[1] == f"{prompts}:1" and data[1]["key"] == 7 and "response" not in data[1].keys()

    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            (["{", "\n"], r"responses.jsonl:1: this line is no JSON: "),
            (["[" * 100_000], r"responses.jsonl:1: this line is no JSON: "),
            ([RESPONSES[0], "[1]\n"], r"responses.jsonl:2: this line is no JSON object, but a list"),
            ([{"response": "a"}], r"responses.jsonl:1: there is no text under 'prompt', only \['response'\]"),
            ([{"prompt": 1, "response": "a"}], r"responses.jsonl:1: there is no text under 'prompt'"),
            ([{"prompt": "Say no.", "response": "No."}], r"responses.jsonl:1: this prompt is not in .*prompts.jsonl"),
            ([], r"responses.jsonl: there are no responses"),
        ],
    )
    def test_broken_responses(self, lines: list[Any], message: str, tmp_path: Path, prompts: str) -> None:
        with pytest.raises(ValueError, match=message):
            read_responses(written(tmp_path / "responses.jsonl", lines), prompts)

    def test_not_utf8(self, tmp_path: Path) -> None:
        (tmp_path / "responses.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
        with pytest.raises(ValueError, match=r"responses.jsonl:1: this line is no JSON: 'utf-8'"):
            read_responses(tmp_path / "responses.jsonl")

    def test_prompts_that_disagree(self, tmp_path: Path) -> None:
        responses = written(tmp_path / "responses.jsonl", RESPONSES)
        same = written(tmp_path / "same.jsonl", [*PROMPTS, {**PROMPTS[0], "key": 9}])
        assert read_responses(responses, same)[0].batch_size == (2,)
        other = written(tmp_path / "other.jsonl", [*PROMPTS, {**PROMPTS[0], "kwargs": [{}, {"a": 1}]}])
        with pytest.raises(
            ValueError, match=r"other.jsonl:3: this prompt is in .*other.jsonl:1 with other instructions"
        ):
            read_responses(responses, other)


class TestCommand:
    def test_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["ifeval", *ARGUMENTS]) == 0
        output = capsys.readouterr()
        lines = output.out.splitlines()
        assert output.err == "" and "\x1b" not in output.out
        # `tests/llm/test_scorer.py` derives the counts: 15 and 22 of 32, 26 and 35 of 54.
        assert lines[0] == "32 prompts, 54 instructions"
        assert lines[1].split() == ["strict", "loose", "number"]
        assert lines[2].split() == ["prompts", "46.9%", "68.8%", "32"]
        assert lines[3].split() == ["instructions", "48.1%", "64.8%", "54"]
        assert len(lines) == 4 + 25 and len(set(map(len, lines[1:]))) == 1
        assert "punctuation:no_comma                            66.7%  100.0%       3" in lines

    @pytest.mark.usefixtures("forked")
    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["ifeval", "--json", "--num-workers", "2", *ARGUMENTS]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["prompt_level_strict_acc"] == 15 / 32 and found["inst_level_loose_acc"] == 35 / 54
        assert (found["prompts"], found["instructions"]) == (32, 54)
        assert (found["prompt_errors"], found["inst_errors"], found["errors"]) == (0, 0, [])
        assert found["types"]["punctuation:no_comma"] == {
            "strict_acc": 2 / 3,
            "loose_acc": 1.0,
            "instructions": 3,
            "inst_errors": 0,
        }

    def test_each_response(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["ifeval", "--per-prompt", *ARGUMENTS]) == 0
        lines = capsys.readouterr().out.splitlines()
        words = [line.split("  ")[1].strip() for line in lines[:32]]
        assert (words.count("followed"), words.count("followed loosely")) == (15, 22 - 15)
        assert lines[1].split()[-2:] == ["punctuation:no_comma,", "length_constraints:number_words"]
        assert lines[32] == "32 prompts, 54 instructions"
        assert main(["ifeval", "--per-prompt", "--json", *ARGUMENTS]) == 0
        responses = json.loads(capsys.readouterr().out)["responses"]
        assert sum(response["loose"] for response in responses) == 22
        assert responses[1]["place"].endswith("responses.jsonl:2")
        assert responses[1]["instructions"][0] == {"id": "punctuation:no_comma", "strict": False, "loose": True}

    def test_missing_data_is_said_beforehand(self, tmp_path: Path) -> None:
        """In a process of its own: the checkers keep what they have loaded."""
        command = [sys.executable, "-m", "tensordict", "ifeval", "--per-prompt", *ARGUMENTS]
        environment = {**os.environ, "NLTK_DATA": str(tmp_path), "HOME": str(tmp_path)}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
        assert run.returncode == 1
        assert run.stderr.splitlines()[0] == (
            "tensordict: 4 instructions of 54 cannot be scored without NLTK's 'punkt_tab', which is not installed "
            "here: python -m nltk.downloader punkt_tab"
        )
        assert "2 prompts and 4 instructions could not be scored and are in no accuracy" in run.stdout
        assert sum("  not scored  " in line for line in run.stdout.splitlines()) == 2

    def test_what_cannot_be_scored(self, tmp_path: Path, prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
        responses = written(tmp_path / "responses.jsonl", [{"prompt": "Say goodbye.", "response": 5}, RESPONSES[0]])
        assert main(["ifeval", responses, "--prompts", prompts]) == 1
        output = capsys.readouterr()
        assert output.out.splitlines()[:2] == [
            "1 prompt, 1 instruction",
            "2 prompts and 3 instructions could not be scored and are in no accuracy",
        ]
        assert output.err.splitlines() == [
            f"{responses}:1: 'response' is not text, but a int",
            f"{prompts}:1: 'response' is missing",
        ]
        assert main(["ifeval", "--json", responses, "--prompts", prompts]) == 1
        output = capsys.readouterr()
        found = json.loads(output.out)
        assert output.err == "" and len(found["errors"]) == 2
        assert found["types"]["detectable_format:title"]["strict_acc"] is None
        assert found["prompt_level_strict_acc"] == 1 and found["prompt_errors"] == 2

    def test_trouble(self, tmp_path: Path, prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["ifeval", str(tmp_path / "none.jsonl")]) == 2
        assert capsys.readouterr().err == f"tensordict: error: No such file or directory: '{tmp_path / 'none.jsonl'}'\n"
        assert main(["ifeval", written(tmp_path / "bad.jsonl", ["{"]), "--prompts", prompts]) == 2
        assert "bad.jsonl:1: this line is no JSON" in capsys.readouterr().err

    def test_without_the_extra(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        from tensordict.llm.checkers import registry

        registry.cache_clear()
        monkeypatch.setitem(sys.modules, "langdetect", None)
        assert main(["ifeval", *ARGUMENTS]) == 2
        assert "this needs the package 'langdetect': pip install 'tensordict[ifeval]'" in capsys.readouterr().err

    def test_on_a_terminal(self, punkt: Path) -> None:
        parent, child = pty.openpty()
        environment = {**os.environ, "NLTK_DATA": str(punkt), "TERM": "xterm-256color", "COLUMNS": "120"}
        environment.pop("NO_COLOR", None)
        command = [sys.executable, "-m", "tensordict", "ifeval", *ARGUMENTS]
        run = subprocess.Popen(command, stdout=child, stderr=subprocess.PIPE, env=environment)
        os.close(child)
        output = b""
        try:
            while piece := os.read(parent, 65536):
                output += piece
        except OSError:  # The other end was closed: all was read.
            pass
        os.close(parent)
        _, errors = run.communicate(timeout=60)
        assert run.returncode == 0, errors
        assert b"\x1b[1m32 prompts, 54 instructions\x1b[0m" in output
