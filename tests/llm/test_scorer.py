"""IFEvalScorer and its summary, on prompts and responses written by hand and on whatever else may be given to them."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tensordict import LazyStackedTensorDict, NonTensorData, TensorClass, TensorDict, lazy_stack, load_memmap
from tensordict.core.exceptions import ContainerExpected, InstructionError, LockedError
from tensordict.llm import IFEvalScoreData, IFEvalScorer, ifeval_summary
from tensordict.llm.checkers import registry
from tensordict.llm.responses import read_responses

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "ifeval"

YES, NO, LOOSELY = (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)

# Expected results of each response, by instruction, as (strict, loose).
EXPECTED = {
    # Ten words without a comma.
    1: [YES, YES],
    # The first line has the comma; without it there are six words, with it ten.
    2: [LOOSELY, LOOSELY],
    # "Harbour" counts as "harbour".
    3: [YES, YES],
    # There is no harbour, but a boat.
    4: [NO, NO],
    # The word to avoid is in the last line.
    5: [LOOSELY],
    # Three times tea, no z.
    6: [YES, YES],
    # Five words, twice "very", two letters e.
    7: [NO, NO, NO],
    # German, as asked.
    8: [YES],
    # English where French was asked for.
    9: [NO],
    # Three sentences, and LATE and HOME in capitals.
    10: [YES, YES],
    # Three sentences where fewer were asked for; each "I" is a word in capitals too.
    11: [NO, NO],
    # Two paragraphs, the second one begins with "Later"; [name] and [place]; a P.S.
    12: [YES, YES, YES],
    # Three paragraphs, two without the first line: then the first one begins with "Once".
    13: [LOOSELY],
    # It begins with "Dear", has one placeholder of three, and a P.S. that is no P.P.S.
    14: [NO, NO, NO],
    # Three bullet points.
    15: [YES],
    # Three bullet points where two were asked for; the last line is the third one.
    16: [LOOSELY],
    # One of the answers, in quotation marks.
    17: [YES, YES],
    # None of the answers; the quotation marks are inside.
    18: [NO, NO],
    # A title; *Sun* and *moon*.
    19: [YES, YES],
    # No title; only *Stars*.
    20: [NO, NO],
    # The divider makes two paragraphs; two times SECTION with a number.
    21: [YES, YES],
    # Two paragraphs of three; SECTION is not Section.
    22: [NO, NO],
    # JSON in a block of markdown.
    23: [YES],
    # A line of text in front of the JSON.
    24: [LOOSELY],
    # Two different answers.
    25: [YES],
    # Twice the same answer.
    26: [NO],
    # The request, the answer, and the phrase at the end.
    27: [YES, YES],
    # A line in front of the request; asterisks after the phrase.
    28: [LOOSELY, LOOSELY],
    # English in capital letters.
    29: [YES],
    # Lowercase letters, but no comma.
    30: [NO, YES],
    # English in lowercase letters.
    31: [YES],
    # "Sure!" has a capital letter.
    32: [LOOSELY],
}
# Counted in the table above. 15 prompts have nothing but YES, and 7 more nothing but YES and LOOSELY.
PROMPTS, PROMPTS_STRICT, PROMPTS_LOOSE = 32, 15, 22
# There are 26 times YES and 9 times LOOSELY.
INSTRUCTIONS, INSTRUCTIONS_STRICT, INSTRUCTIONS_LOOSE = 54, 26, 35
# How many instructions of a type there are, and how many are followed: strictly, loosely.
TYPES = {
    "change_case:capital_word_frequency": (2, 1, 1),
    "change_case:english_capital": (2, 1, 1),
    "change_case:english_lowercase": (2, 1, 2),
    "combination:repeat_prompt": (2, 1, 2),
    "combination:two_responses": (2, 1, 1),
    "detectable_content:number_placeholders": (2, 1, 1),
    "detectable_content:postscript": (2, 1, 1),
    "detectable_format:constrained_response": (2, 1, 1),
    "detectable_format:json_format": (2, 1, 2),
    "detectable_format:multiple_sections": (2, 1, 1),
    "detectable_format:number_bullet_lists": (2, 1, 2),
    "detectable_format:number_highlighted_sections": (2, 1, 1),
    "detectable_format:title": (2, 1, 1),
    "keywords:existence": (2, 1, 1),
    "keywords:forbidden_words": (3, 1, 2),
    "keywords:frequency": (2, 1, 1),
    "keywords:letter_frequency": (2, 1, 1),
    "language:response_language": (2, 1, 1),
    "length_constraints:nth_paragraph_first_word": (3, 1, 2),
    "length_constraints:number_paragraphs": (2, 1, 1),
    "length_constraints:number_sentences": (2, 1, 1),
    "length_constraints:number_words": (3, 1, 2),
    "punctuation:no_comma": (3, 2, 3),
    "startend:end_checker": (2, 1, 2),
    "startend:quotation": (2, 1, 1),
}


def example() -> LazyStackedTensorDict:
    data, _ = read_responses(EXAMPLE / "responses.jsonl", EXAMPLE / "prompts.jsonl")
    return data


def item(**changes: Any) -> TensorDict:
    """A response that follows the one of its two instructions that is about commas."""
    given = {
        "prompt": "Name two colours in less than 3 words, and without commas.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{}, {"num_words": 3, "relation": "less than"}],
        "response": "Red and blue.",
        **changes,
    }
    # The values stay unchanged, so that wrong values in a test stay wrong.
    return TensorDict({name: NonTensorData(value) for name, value in given.items() if value is not None})


class TestExample:
    def test_covers_all_types(self) -> None:
        assert len(registry()) == 25 and sorted(registry()) == sorted(TYPES)

    def test_scores(self) -> None:
        data = IFEvalScorer()(example())
        assert data.batch_size == (PROMPTS,)
        for key, row in zip(EXPECTED, data.unbind(0)):
            assert row["key"] == key
            strict, loose = map(list, zip(*EXPECTED[key]))
            scores = row["ifeval_score"]
            assert type(scores) is IFEvalScoreData
            assert scores.inst_level_strict_acc.tolist() == strict, key
            assert scores.inst_level_loose_acc.tolist() == loose, key
            assert scores.prompt_level_strict_acc.tolist() == [float(0.0 not in strict)], key
            assert scores.prompt_level_loose_acc.tolist() == [float(0.0 not in loose)], key

    def test_summary(self) -> None:
        summary = ifeval_summary(IFEvalScorer()(example()))
        assert (summary.prompts.item(), summary.instructions.item()) == (PROMPTS, INSTRUCTIONS)
        assert (summary.prompt_errors.item(), summary.inst_errors.item()) == (0, 0)
        assert summary.prompt_level_strict_acc.item() == PROMPTS_STRICT / PROMPTS
        assert summary.prompt_level_loose_acc.item() == PROMPTS_LOOSE / PROMPTS
        assert summary.inst_level_strict_acc.item() == INSTRUCTIONS_STRICT / INSTRUCTIONS
        assert summary.inst_level_loose_acc.item() == INSTRUCTIONS_LOOSE / INSTRUCTIONS
        assert sorted(summary.types.keys()) == sorted(TYPES)
        for name, (number, strict, loose) in TYPES.items():
            found = summary.types[name]
            assert found["instructions"].item() == number and found["inst_errors"].item() == 0
            assert found["strict_acc"].item() == strict / number
            assert found["loose_acc"].item() == loose / number

    def test_the_harness_agrees(self) -> None:
        from lm_eval.tasks.ifeval.utils import process_results

        prompts, answers = (
            [json.loads(line) for line in (EXAMPLE / name).read_text(encoding="utf-8").splitlines()]
            for name in ("prompts.jsonl", "responses.jsonl")
        )
        for prompt, answer, (key, expected) in zip(prompts, answers, EXPECTED.items()):
            found = process_results(prompt, [answer["response"]])
            strict, loose = map(list, zip(*expected))
            assert found["inst_level_strict_acc"] == strict and found["inst_level_loose_acc"] == loose, key
            assert found["prompt_level_strict_acc"] == (0.0 not in strict), key
            assert found["prompt_level_loose_acc"] == (0.0 not in loose), key

    @pytest.mark.usefixtures("forked")
    def test_spread_over_processes(self) -> None:
        alone, spread = example(), example()
        IFEvalScorer(reward_key="reward", errors="collect")(alone)
        IFEvalScorer(reward_key="reward", errors="collect", num_workers=2)(spread)
        assert torch.equal(alone["reward"], spread["reward"])
        assert alone["ifeval_errors"] == spread["ifeval_errors"] == [[]] * PROMPTS
        for one, other in zip(alone.unbind(0), spread.unbind(0)):
            assert (one["ifeval_score"] == other["ifeval_score"]).all()


class Turn(TensorClass):
    """The parts of a conversation that a program may store."""

    prompt: str
    response: str
    instruction_id_list: list[str]
    kwargs: list[dict[str, Any]]
    ifeval_score: IFEvalScoreData | None = None


class TestInput:
    def test_one_item(self) -> None:
        data = item()
        assert IFEvalScorer()(data) is data
        scores = data["ifeval_score"]
        assert scores.batch_size == () and scores.inst_level_strict_acc.tolist() == [1, 0]
        assert scores.prompt_level_strict_acc.tolist() == [0] and "ifeval_errors" not in data

    def test_rows_of_the_data_set(self) -> None:
        none = {"num_words": None, "relation": None, "keywords": None}
        row = {
            "key": 1000,
            "prompt": "Name two colours.",
            "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
            "kwargs": [none, {**none, "num_words": 3.0, "relation": "less than", "frequency": math.nan}],
        }
        data = lazy_stack([TensorDict({**row, "response": text}) for text in ("Red, blue", "Red and blue")])
        scores = IFEvalScorer()(data)["ifeval_score"]
        assert scores.inst_level_strict_acc.tolist() == [[0, 1], [1, 0]]

    def test_columns_of_the_data_set(self) -> None:
        columns = {
            "prompt": ["a", "b"],
            "instruction_id_list": [["punctuation:no_comma"], ["punctuation:no_comma", "startend:quotation"]],
            "kwargs": [[{}], [{}, {}]],
            "response": ["one, two", "'three'"],
        }
        scores = IFEvalScorer()(TensorDict(columns, batch_size=[2]))["ifeval_score"]
        padded = scores.get("inst_level_loose_acc", as_padded_tensor=True, padding_value=-1)
        assert padded.tolist() == [[0, -1], [1, 0]]

    def test_other_and_nested_keys(self) -> None:
        names = {"prompt": ("in", "text"), "response": ("out", "text"), "instruction_id_list": "ids", "kwargs": "how"}
        given = item()
        data = TensorDict()
        for name, key in names.items():
            data[key] = given.get(name)
        scorer = IFEvalScorer(
            prompt_key=("in", "text"),
            response_key=("out", ("text",)),
            instruction_ids_key="ids",
            keyword_args_key="how",
            score_key=("out", "score"),
            reward_key=("out", "reward"),
            errors="collect",
            errors_key=("out", "wrong"),
        )
        assert scorer(data)["out", "score"].inst_level_strict_acc.tolist() == [1, 0]
        assert data["out", "reward"].tolist() == [0.25] and data["out", "wrong"] == []
        assert ifeval_summary(data, score_key=("out", "score"), instruction_ids_key="ids").instructions.item() == 2
        del data["ids"]
        with pytest.raises(InstructionError, match="^'ids' is missing$"):
            IFEvalScorer(
                prompt_key=("in", "text"),
                response_key=("out", "text"),
                instruction_ids_key="ids",
                keyword_args_key="how",
            )(data)

    def test_a_tensorclass(self) -> None:
        turn = Turn("Say it.", "Yes, sir.", ["punctuation:no_comma"], [{}])
        assert IFEvalScorer()(turn) is turn
        assert turn.ifeval_score is not None and turn.ifeval_score.prompt_level_loose_acc.tolist() == [0]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_batches_of_two_dims(self, workers: int) -> None:
        def grid(last: Any) -> Any:
            texts = [["a", "b, c", "d"], ["e, f", "g", last]]
            given = {"instruction_id_list": ["punctuation:no_comma", "detectable_format:title"], "kwargs": [{}, {}]}
            return lazy_stack([lazy_stack([item(response=text, **given) for text in row]) for row in texts])

        data = IFEvalScorer(reward_key="reward", errors="collect", num_workers=workers)(grid("h"))
        assert data["ifeval_score"].batch_size == (2, 3)
        assert data["ifeval_score"].inst_level_strict_acc[..., 0].tolist() == [[1, 0, 1], [0, 1, 1]]
        assert data["reward"].shape == (2, 3, 1) and data["ifeval_errors"] == [[[]] * 3] * 2
        with pytest.raises(InstructionError, match=r"^row \(1, 2\): 'response' is not text, but a int$"):
            IFEvalScorer(num_workers=workers)(grid(5))

    def test_an_empty_batch(self) -> None:
        data = TensorDict(batch_size=[0])
        IFEvalScorer(reward_key="reward", errors="collect")(data)
        assert data["ifeval_score"].prompt_level_strict_acc.shape == data["reward"].shape == (0, 1)
        summary = ifeval_summary(data)
        assert summary.prompts.item() == 0 and math.isnan(summary.prompt_level_strict_acc.item())

    def test_scoring_again_replaces_the_scores(self) -> None:
        data = item()
        IFEvalScorer(reward_key="reward")(data)
        data["response"] = "Blue"
        IFEvalScorer(reward_key="reward")(data)
        assert data["ifeval_score"].inst_level_strict_acc.tolist() == [1, 1] and data["reward"].tolist() == [1]

    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        # Dicts, lists of different lengths and text go to disk and come back; so do the scores.
        data = lazy_stack([item(), item(instruction_id_list=["punctuation:no_comma"], kwargs=[{"a": None}])])
        data.save(tmp_path / "data")
        scored = IFEvalScorer()(load_memmap(tmp_path / "data").clone())
        scored.save(tmp_path / "scored")
        program = "import sys, tensordict; print(type(tensordict.load_memmap(sys.argv[1])['ifeval_score']).__name__)"
        command = [sys.executable, "-c", program, str(tmp_path / "scored")]
        assert subprocess.run(command, capture_output=True, text=True, timeout=120).stdout == "IFEvalScoreData\n"
        assert ifeval_summary(load_memmap(tmp_path / "scored")).inst_level_strict_acc.item() == 2 / 3

    def test_no_container(self) -> None:
        with pytest.raises(ContainerExpected, match=r"got dict; use TensorDict\(data\)"):
            IFEvalScorer()({"prompt": "a"})


class TestReward:
    def test_weights(self) -> None:
        # Strictly and loosely alike, one of the two instructions is followed, so the prompt is not.
        data = item()
        weights = {"prompt_level_strict_acc": 10.0, "inst_level_strict_acc": 4.0, "inst_level_loose_acc": 1.0}
        IFEvalScorer(reward_key="reward", weights=weights)(data)
        assert data["reward"].tolist() == [4 * 0.5 + 1 * 0.5] and data["reward"].dtype == torch.float32

    def test_loose_weighs_less_than_both(self) -> None:
        data = item(response="Red,\nblue")
        # Loosely, each instruction is followed: without a line there is one word. Strictly, it is the number of words.
        IFEvalScorer(reward_key="reward")(data)
        assert data["reward"].tolist() == [0.25 * 0 + 0.25 * 0.5 + 0.25 * 1 + 0.25 * 1]

    def test_unknown_weights(self) -> None:
        with pytest.raises(ValueError, match=r"weights of \['style'\].*inst_level_loose_acc"):
            IFEvalScorer(weights={"style": 1.0})


BAD = {
    "unknown id": (
        {"instruction_id_list": ["punctuation:no_coma", "length_constraints:number_words"]},
        r"'instruction_id_list'\[0\], 'punctuation:no_coma': this .* unknown; did you mean 'punctuation:no_comma'\?",
        [math.nan, 0.0],
    ),
    "unlike any id": (
        {"instruction_id_list": ["xyz", "length_constraints:number_words"]},
        "'xyz': this instruction id is unknown; known are keywords:existence, ",
        [math.nan, 0.0],
    ),
    "kwargs missing": (
        {"kwargs": [{}, {"num_words": 3, "relation": None}]},
        r"\[1\], 'length_constraints:number_words': its kwargs lack \['relation'\]: this type takes \['num_words', ",
        [1.0, math.nan],
    ),
    "kwargs of another type": (
        {"kwargs": [{"letter": "a"}, {"num_words": 3, "relation": "less than"}]},
        r"its kwargs have \['letter'\] too many: this type takes \[\]",
        [math.nan, 0.0],
    ),
    "kwargs refused": (
        {"kwargs": [{}, {"num_words": 3, "relation": "about"}]},
        "its checker does not take .*'about'.*: ValueError: ",
        [1.0, math.nan],
    ),
    "kwargs ignored": (
        {"kwargs": [{}, {"num_words": -3, "relation": "less than"}]},
        "does not take num_words=-3: it would check for a random value",
        [1.0, math.nan],
    ),
    "a pattern that is none": (
        {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["(c"]}]},
        "its checker failed: .*: missing \\)",
        [math.nan],
    ),
    "too few kwargs": (
        {"kwargs": [{}]},
        "'kwargs' has 1 dicts for the 2 instructions in 'instruction_id_list'",
        [math.nan, math.nan],
    ),
    "kwargs no dicts": ({"kwargs": [{}, "3"]}, r"'kwargs'\[1\] is no dict, but a str", [math.nan, math.nan]),
    "kwargs no list": ({"kwargs": {"a": 1}}, "'kwargs' is no list of dicts, but a dict", [math.nan, math.nan]),
    "response no text": ({"response": b"Red"}, "'response' is not text, but a bytes", [math.nan, math.nan]),
    "prompt no text": ({"prompt": 7}, "'prompt' is not text, but a int", [math.nan, math.nan]),
    "ids no list": ({"instruction_id_list": "a"}, "'instruction_id_list' is no list of ids, but a str", [math.nan]),
    "ids no text": (
        {"instruction_id_list": [1]},
        r"'instruction_id_list'\[0\] is no id, but a int",
        [math.nan],
    ),
    "no instruction": (
        {"instruction_id_list": [], "kwargs": []},
        "'instruction_id_list' is empty",
        [math.nan],
    ),
    "no response": ({"response": None}, "'response' is missing", [math.nan, math.nan]),
    "no prompt": ({"prompt": None}, "'prompt' is missing", [math.nan, math.nan]),
    "no kwargs": ({"kwargs": None}, "'kwargs' is missing", [math.nan, math.nan]),
    "no ids": ({"instruction_id_list": None}, "'instruction_id_list' is missing", [math.nan]),
}


class TestBadInput:
    @pytest.mark.parametrize("name", BAD)
    def test_raises(self, name: str) -> None:
        changes, message, _ = BAD[name]
        data = lazy_stack([item(), item(**changes), item()])
        with pytest.raises(InstructionError, match=f"^row 1: .*{message}"):
            IFEvalScorer()(data)
        assert "ifeval_score" not in data
        with pytest.raises(InstructionError, match=f"^(?!row).*{message}"):
            IFEvalScorer()(item(**changes))

    # Processes take a while to start, and these three take all the ways that there are.
    @pytest.mark.parametrize(
        ("name", "workers"),
        [*((name, 0) for name in BAD), *((name, 2) for name in ("unknown id", "no ids", "response no text"))],
    )
    def test_other_rows_keep_their_scores(self, name: str, workers: int) -> None:
        changes, message, scores = BAD[name]
        data = lazy_stack([item(), item(**changes), item(response="Blue")])
        IFEvalScorer(errors="collect", reward_key="reward", num_workers=workers)(data)
        rows = [row["ifeval_score"] for row in data.unbind(0)]
        assert rows[0].inst_level_strict_acc.tolist() == [1, 0] and rows[2].inst_level_strict_acc.tolist() == [1, 1]
        for found in (rows[1].inst_level_strict_acc, rows[1].inst_level_loose_acc):
            torch.testing.assert_close(found, torch.tensor(scores), equal_nan=True, rtol=0, atol=0)
        assert rows[1].prompt_level_strict_acc.isnan().all() and rows[1].prompt_level_loose_acc.isnan().all()
        assert data["reward"].isnan().flatten().tolist() == [False, True, False]
        fine, wrong, also_fine = data["ifeval_errors"]
        assert fine == also_fine == [] and len(wrong) == 1
        assert re.search(message, wrong[0])

    def test_summary_leaves_out_what_has_no_score(self) -> None:
        data = lazy_stack([item(), item(instruction_id_list=["xyz", "length_constraints:number_words"])])
        summary = ifeval_summary(IFEvalScorer(errors="collect")(data))
        assert summary.prompts.item() == summary.prompt_errors.item() == 1
        assert (summary.instructions.item(), summary.inst_errors.item()) == (3, 1)
        assert summary.inst_level_strict_acc.item() == 1 / 3
        assert math.isnan(summary.types["xyz", "strict_acc"].item()) and summary.types["xyz", "inst_errors"].item() == 1
        assert summary.types["length_constraints:number_words", "instructions"].item() == 2

    def test_summary_of_scores_that_do_not_fit(self) -> None:
        data = IFEvalScorer()(item())
        data["instruction_id_list"] = NonTensorData(["punctuation:no_comma"])
        with pytest.raises(ValueError, match="2 scores of instructions do not fit 'instruction_id_list'"):
            ifeval_summary(data)
        with pytest.raises(KeyError, match="'ids' is missing next to the scores"):
            ifeval_summary(data, instruction_ids_key="ids")

    def test_a_failed_write_changes_nothing(self) -> None:
        data = item()
        with pytest.raises(KeyError, match="reward"):
            IFEvalScorer(reward_key=("prompt", "reward"))(data)
        assert "ifeval_score" not in data
        with pytest.raises(LockedError, match="cannot write 'ifeval_score'"):
            IFEvalScorer()(data.lock_())

    def test_bad_options(self) -> None:
        with pytest.raises(ValueError, match="each key needs a place of its own, got 'response' twice"):
            IFEvalScorer(score_key="response")
        with pytest.raises(ValueError, match="'raise' or 'collect', got 'ignore'"):
            IFEvalScorer(errors="ignore")  # type: ignore[arg-type]

    @pytest.mark.parametrize("module", ["langdetect", "nltk", "immutabledict", "lm_eval.tasks"])
    def test_an_absent_extra(self, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
        registry()
        monkeypatch.setitem(sys.modules, module, None)
        registry.cache_clear()
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'tensordict\[ifeval\]'"):
            IFEvalScorer(errors="collect")(item())
        monkeypatch.undo()
        assert len(registry()) == 25


OFFLINE = """
import sys
def no_network(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise SystemExit(f"{event}{arguments}")
sys.addaudithook(no_network)
import nltk
nltk.data.path[:] = [sys.argv[1]]
from tensordict import TensorDict, lazy_stack
from tensordict.llm import IFEvalScorer
told = {"num_sentences": 1, "capital_frequency": 1, "relation": "at least", "capital_relation": "at least"}
def row(name, *taken):
    given = {"prompt": "a", "response": "One.", "instruction_id_list": [name, "punctuation:no_comma"]}
    return TensorDict({**given, "kwargs": [{key: told[key] for key in taken}, {}]})
data = lazy_stack([
    row("length_constraints:number_sentences", "num_sentences", "relation"),
    row("change_case:capital_word_frequency", "capital_frequency", "capital_relation"),
])
IFEvalScorer(errors="collect")(data)
print(data["ifeval_score"].inst_level_strict_acc.tolist())
print("\\n".join(line for lines in data["ifeval_errors"] for line in lines))
IFEvalScorer()(data[0])
"""


def test_absent_language_data_is_an_error_and_not_downloaded(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", OFFLINE, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    scores, *problems = run.stdout.splitlines()
    assert scores == "[[nan, 1.0], [nan, 1.0]]", run.stderr
    assert len(problems) == 2
    for problem in problems:
        assert "needs NLTK's 'punkt_tab', which is not installed here: python -m nltk.downloader punkt_tab" in problem
    assert run.returncode == 1
    assert (
        "InstructionError: 'instruction_id_list'[0], 'length_constraints:number_sentences': its checker" in run.stderr
    )
