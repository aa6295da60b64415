# SPDX-License-Identifier: Apache-2.0
"""The commands about two vocabularies: what they print, write and refuse."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from cohobate.cli import drawing, main
from cohobate.teachers.load import load_tokenizer
from cohobate.vocab import Projection, SubtokenTables
from small_tokenizers import bpe, chat_tokenizer, word_tokenizer

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tokenizers")
    chat_tokenizer().save_pretrained(place / "a")
    other = PreTrainedTokenizerFast(tokenizer_object=bpe(size=330), eos_token="<|im_end|>", bos_token="<|im_start|>")
    other.save_pretrained(place / "b")
    word_tokenizer({"<unk>": 0, "<eos>": 1, "a": 2}).save_pretrained(place / "words")
    for name in ("a", "b", "words"):
        (place / name / "config.json").write_text('{"model_type": "llama"}')
    return place


@pytest.fixture
def run(folders: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    for name in ("a", "b", "words"):
        (tmp_path / name).symlink_to(folders / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def command(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        out, err = capfd.readouterr()
        return int(caught.value.code or 0), out, err

    return command


PAIR = ("-s", "a", "-t", "b")


def test_align_draws_both_sides_over_the_same_bytes(run: Command):
    code, out, _ = run("align", "The quick <€", *PAIR)
    assert code == 0
    student, teacher = (line for line in out.splitlines() if line.startswith(("student ", "teacher ")))
    bare = [line[9:].replace("│", "").replace("┃", "").replace(" ", "") for line in (student, teacher)]
    assert bare[0].startswith("The·quick·<")
    assert bare[1].startswith("The·quick·<")
    assert [i for i, c in enumerate(student) if c == "┃"] == [i for i, c in enumerate(teacher) if c == "┃"]
    assert "chunks: 1:1" in out


def test_align_writes_a_picture_that_is_well_formed_and_says_every_token(run: Command):
    code, out, _ = run("align", "a <b> & c", *PAIR, "-o", "x.svg")
    assert (code, "written: x.svg" in out) == (0, True)
    root = ElementTree.fromstring(Path("x.svg").read_text())
    texts = "".join(node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text"))
    assert "&" in texts
    assert texts.count("<") == texts.count(">") == 2
    assert run("align", "a", *PAIR, "-o", "x.html")[0] == 0
    assert Path("x.html").read_text().startswith("<!doctype html>")
    code, _, err = run("align", "a", *PAIR, "-o", "x.png")
    assert (code, "a drawing is an .svg or .html file" in err) == (2, True)


def test_tokens_without_a_counterpart_have_a_column_of_their_own():
    found = drawing.columns(["<s>", "a", "b"], ["ab"], [(1, 3, 0, 1)])
    assert [(c.student, c.teacher) for c in found] == [(("<s>",), ()), (("a", "b"), ("ab",))]
    assert [column.width for column in found] == [3, 3]


def test_long_texts_are_broken_into_lines_of_the_width():
    found = drawing.columns(["abc"] * 50, ["abc"] * 50, [(i, i + 1, i, i + 1) for i in range(50)])
    drawn = drawing.terminal(found, 60)
    assert max(len(line.plain) for line in drawn) <= 60
    assert sum(line.plain.count("abc") for line in drawn) == 100


def test_subtokens_are_built_checked_and_shown(run: Command):
    code, out, _ = run("subtokens", "build", "--student", "a", "--teacher", "b", "--output", "tables")
    assert code == 0
    assert sorted(p.name for p in Path("tables").iterdir()) == [
        "student_to_teacher.safetensors",
        "teacher_to_student.safetensors",
    ]
    assert "tokens are on both sides" in out
    assert run("subtokens", "validate", "tables", *PAIR)[:2] == (
        0,
        "tables belongs to these two tokenizers, and every chain spells its token\n",
    )
    code, _, err = run("subtokens", "validate", "tables", "-s", "b", "-t", "a")
    assert (code, "swapped" in err) == (2, True)
    code, out, _ = run("subtokens", "show", "tables", *PAIR)
    assert code == 0
    assert "tokens on both sides: " in out
    assert "a few lines of several scripts: " in out
    assert SubtokenTables.load("tables").common[0].size > 0


def test_one_direction_at_a_time_gives_two_files_that_load_as_a_pair(run: Command):
    for name, source, destination in (("f", "a", "b"), ("r", "b", "a")):
        assert run("subtokens", "build", "--source", source, "--destination", destination, "-o", name)[0] == 0
    assert run("subtokens", "validate", "f", *PAIR, "r")[0] == 0
    code, _, err = run("subtokens", "validate", "f", *PAIR)
    assert (code, "holds source_to_destination, not student_to_teacher: a pair needs both" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "x"), "give --student and --teacher for a pair of tables"),
        (("-o", "x", "--student", "a"), "--teacher is missing"),
        (("-o", "x", *PAIR, "--source", "a", "--destination", "b"), "give --student and --teacher for a pair"),
        (("-o", "x", *PAIR, "--role", "eos"), "wanted STUDENT_SPECIAL=TEACHER_SPECIAL"),
        (("-o", "x", *PAIR, "--role", "<|im_end|>=<none>"), "names '<none>', which"),
        (("-o", "x", "-s", "a", "-t", "words"), "is a WordLevel vocabulary"),
        (("-o", "none/x", "--source", "a", "--destination", "b"), "there is no folder none"),
    ],
)
def test_a_wrong_build_is_refused_with_the_cure(run: Command, arguments: tuple[str, ...], message: str):
    code, _, err = run("subtokens", "build", *arguments)
    assert code == 2
    assert message in err
    assert not Path("x").exists()


def test_a_projection_is_built_checked_and_shown(run: Command):
    code, out, _ = run("projection", "build", *PAIR, "-o", "p", "--top-k", "3")
    assert code == 0
    assert " exact, " in out
    assert Projection.load("p").indices.shape[1] == 3
    assert run("projection", "validate", "p", *PAIR)[0] == 0
    code, _, err = run("projection", "validate", "p", "-s", "b", "-t", "a")
    assert (code, "swapped" in err) == (2, True)
    code, out, _ = run("projection", "show", "p", *PAIR)
    assert code == 0
    assert out.count("  student token ") == 5


@pytest.mark.parametrize("command", [["align"], ["subtokens"], ["subtokens", "build"], ["projection", "build"]])
def test_help_says_what_is_supported_or_how_it_is_called(run: Command, command: list[str]):
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert "ByteLevel BPE" in out or "cohobate " in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("align", "x", *PAIR, "-o", "folder.svg"), "--output folder.svg: that is a folder"),
        (("align", "\udcff\udcfe", *PAIR), "the text is no UTF-8 text"),
        (("align", "x", "-s", "corrupt", "-t", "b"), "the tokenizer in"),
        (("subtokens", "build", *PAIR, "-o", "bytes"), "--output bytes: that is a file"),
        (("subtokens", "build", "--source", "a", "--destination", "b", "-o", "folder.svg"), "that is a folder"),
        (("projection", "build", *PAIR, "-o", "folder.svg"), "that is a folder"),
        (("projection", "show", "p", *PAIR, "--text", "none.txt"), "--text none.txt: there is no such file"),
        (("projection", "show", "p", *PAIR, "--text", "bytes"), "--text bytes is no UTF-8 text"),
        (("projection", "show", "p", "-s", "b", "-t", "a"), "the two sides are swapped"),
    ],
)
def test_a_wrong_path_or_file_is_one_line(run: Command, arguments: tuple[str, ...], message: str):
    Path("folder.svg").mkdir()
    Path("bytes").write_bytes(bytes(range(256)))
    Path("corrupt").mkdir()
    Path("corrupt/tokenizer.json").write_text('{"a":')
    Path("corrupt/config.json").write_text('{"model_type": "llama"}')
    if "p" in arguments:
        Projection.build(load_tokenizer("a"), load_tokenizer("b")).save("p")
    code, _, err = run(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
