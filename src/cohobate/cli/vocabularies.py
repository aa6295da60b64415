# SPDX-License-Identifier: Apache-2.0
"""`cohobate subtokens` and `cohobate projection`: what relates two vocabularies, made once and kept in a file."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from cohobate.cli.align import check_output, checked_text, summary
from cohobate.errors import ConfigError

SUPPORTED = (
    "Promised for fast ByteLevel BPE tokenizers (Llama 3, Qwen, SmolLM, DeepSeek, GPT-2 ...). SentencePiece-style BPE "
    "with byte fallback is accepted if every chain spells its token. Everything else is refused."
)
subtokens = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help=f"Sub-token tables for CSD. {SUPPORTED}")
projection = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help=f"Projections for X-Token. {SUPPORTED}")

Student = Annotated[str | None, typer.Option("--student", "-s", help="Folder or name of the student or tokenizer.")]
Teacher = Annotated[str | None, typer.Option("--teacher", "-t", help="The same for the teacher.")]
Role = Annotated[
    list[str] | None,
    typer.Option("--role", help="Pair two specials: '<|im_end|>=<|eot_id|>'. May be given several times."),
]
SampleText = Annotated[
    Path | None, typer.Option("--text", help="Text file to count kinds of chunks on; default: a few lines.")
]
SAMPLE = (
    "The quick brown fox jumps over the lazy dog. Prices rose by 1,234.56 euros in 2024.\n"
    "def area(radius):\n    return 3.14159265 * radius ** 2\n"
    "Привет, как дела? 日本語のテキストです。 مرحبا بالعالم 👍🏽 naïve façade\n"
)


@subtokens.command("build")
def build_subtokens(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for a pair, file for one direction.")],
    student: Student = None,
    teacher: Teacher = None,
    source: Annotated[str | None, typer.Option("--source", help="With --destination: one direction only.")] = None,
    destination: Annotated[str | None, typer.Option("--destination", help="Whose tokens spell the source's.")] = None,
    role: Role = None,
) -> None:
    """Build the tables of two vocabularies; seconds, once for a pair of tokenizers.

    [cyan]cohobate subtokens build --student A --teacher B --output tables/[/cyan]
    [cyan]cohobate subtokens build --source A --destination B --output a_b.safetensors[/cyan]
    """
    from cohobate.vocab.chains import Vocabulary, build_table, shared_roles
    from cohobate.vocab.subtokens import FORWARD, REVERSE, SINGLE, SubtokenTables, write_tables

    both, one = (
        _both("--student", student, "--teacher", teacher),
        _both("--source", source, "--destination", destination),
    )
    if bool(both) == bool(one):
        raise ConfigError("give --student and --teacher for a pair of tables, or --source and --destination for one.")
    if one:
        check_output(output)
        first, second = _tokenizers(*one)
        vocabularies = Vocabulary.of(first), Vocabulary.of(second)
        with _Progress() as progress:
            table = build_table(*vocabularies, shared_roles(first, second, _roles(role)), progress)
        write_tables(output, {SINGLE: table})
        print(_lengths("source tokens", table))
    else:
        if output.exists() and not output.is_dir():
            raise ConfigError(f"--output {output}: that is a file. The tables of a pair go into a folder.")
        first, second = _tokenizers(*both)
        with _Progress() as progress:
            tables = SubtokenTables.build(first, second, _roles(role), progress=progress)
        output.mkdir(parents=True, exist_ok=True)
        for name in (FORWARD, REVERSE):
            write_tables(output / f"{name}.safetensors", {name: getattr(tables, name)})
        print(_lengths("student tokens", tables.student_to_teacher))
        print(_lengths("teacher tokens", tables.teacher_to_student))
        print(f"{len(tables.common[0])} tokens are on both sides")
    print(f"written: {output}")


@subtokens.command("validate")
def validate_subtokens(
    path: Annotated[Path, typer.Argument(help="Folder, file of a pair, or the student's table.", metavar="TABLES")],
    student: Annotated[str, typer.Option("--student", "-s", help="The student's tokenizer.")],
    teacher: Annotated[str, typer.Option("--teacher", "-t", help="The teacher's tokenizer.")],
    reverse: Annotated[Path | None, typer.Argument(help="The teacher's table, if it is a file of its own.")] = None,
) -> None:
    """Check tables against the tokenizers in use; exit code 2 and the reason if they do not belong together."""
    from cohobate.vocab import SubtokenTables

    SubtokenTables.load(path, reverse).validate(*_tokenizers(student, teacher))
    print(f"{path} belongs to these two tokenizers, and every chain spells its token")


@subtokens.command("show")
def show_subtokens(
    path: Annotated[Path, typer.Argument(help="Folder, file of a pair, or the student's table.", metavar="TABLES")],
    student: Annotated[str, typer.Option("--student", "-s", help="The student's tokenizer.")],
    teacher: Annotated[str, typer.Option("--teacher", "-t", help="The teacher's tokenizer.")],
    reverse: Annotated[Path | None, typer.Argument(help="The teacher's table, if it is a file of its own.")] = None,
    text: SampleText = None,
) -> None:
    """Overlap of the vocabularies, kinds of chunks in a text, and the longest chains."""
    from cohobate.vocab import SubtokenTables, token_bytes

    tables = SubtokenTables.load(path, reverse)
    tokenizers = _tokenizers(student, teacher)
    tables.validate(*tokenizers)
    common = len(tables.common[0])
    print(
        f"tokens on both sides: {common} = {common / len(tables.student_to_teacher):.1%} of the student's, "
        f"{common / len(tables.teacher_to_student):.1%} of the teacher's"
    )
    for name, table, (source, destination) in (
        ("student token", tables.student_to_teacher, tokenizers),
        ("teacher token", tables.teacher_to_student, tokenizers[::-1]),
    ):
        print(_lengths(f"{name}s", table))
        pieces, wanted = token_bytes(source), token_bytes(destination)
        longest = sorted(range(len(table)), key=lambda i: (-int(table.lengths()[i]), i))[:5]
        for i in longest:
            if (piece := pieces[i]) is not None and len(table[i]) > 1:
                chain = " ".join(repr((wanted[j] or b"").decode("utf-8", "backslashreplace")) for j in table[i])
                print(f"  {name} {i} {piece.decode('utf-8', 'backslashreplace')!r}: {len(table[i])} tokens, {chain}")
    print(_chunk_kinds(tokenizers, text))


@projection.command("build")
def build_projection(
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    student: Annotated[str, typer.Option("--student", "-s", help="The student's tokenizer.")],
    teacher: Annotated[str, typer.Option("--teacher", "-t", help="The teacher's tokenizer.")],
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Teacher tokens that a student token stands for.")] = 4,
    reverse_pass: Annotated[bool, typer.Option(help="Teacher tokens weigh on what spells them, too.")] = True,
    role: Role = None,
) -> None:
    """Build the projection of one vocabulary onto another.

    [cyan]cohobate projection build --student A --teacher B --output a_b.safetensors[/cyan]
    """
    from cohobate.vocab import Projection

    check_output(output)
    with _Progress() as progress:
        made = Projection.build(
            *_tokenizers(student, teacher),
            top_k,
            special_roles=_roles(role),
            reverse_pass=reverse_pass,
            progress=progress,
        )
    made.save(output)
    print(_rows(made))
    print(f"written: {output}")


@projection.command("validate")
def validate_projection(
    path: Annotated[Path, typer.Argument(help="The file.", metavar="PROJECTION")],
    student: Annotated[str, typer.Option("--student", "-s", help="The student's tokenizer.")],
    teacher: Annotated[str, typer.Option("--teacher", "-t", help="The teacher's tokenizer.")],
) -> None:
    """Check a projection against the tokenizers in use; exit code 2 and the reason if they do not belong together."""
    from cohobate.vocab import Projection

    Projection.load(path).validate(*_tokenizers(student, teacher))
    print(f"{path} belongs to these two tokenizers")


@projection.command("show")
def show_projection(
    path: Annotated[Path, typer.Argument(help="The file.", metavar="PROJECTION")],
    student: Annotated[str, typer.Option("--student", "-s", help="The student's tokenizer.")],
    teacher: Annotated[str, typer.Option("--teacher", "-t", help="The teacher's tokenizer.")],
    text: SampleText = None,
) -> None:
    """Exact rows, rows that are spread, a few of them, and kinds of chunks in a text."""
    from cohobate.vocab import Projection, token_bytes

    made = Projection.load(path)
    tokenizers = _tokenizers(student, teacher)
    made.validate(*tokenizers)
    print(_rows(made))
    pieces, wanted = token_bytes(tokenizers[0]), token_bytes(tokenizers[1])
    shown = 0
    for i in range(made.student_vocab_size):
        piece = pieces[i]
        entries = [(int(j), float(w)) for j, w in zip(made.indices[i], made.weights[i], strict=True) if j >= 0]
        if piece is not None and len(entries) > 1 and shown < 5:
            row = ", ".join(f"{(wanted[j] or b'').decode('utf-8', 'backslashreplace')!r} {w:.3f}" for j, w in entries)
            print(f"  student token {i} {piece.decode('utf-8', 'backslashreplace')!r}: {row}")
            shown += 1
    print(_chunk_kinds(tokenizers, text))


class _Progress:
    """Adapts a builder's reports to the command's bar; a second direction starts it anew."""

    def __enter__(self) -> Any:
        from cohobate.cli.progress import Steps

        self._steps = Steps("token", 1).__enter__()
        return self._steps.advance_to

    def __exit__(self, *exception: object) -> None:
        self._steps.__exit__(*exception)


def _tokenizers(first: str, second: str) -> tuple[Any, Any]:
    from cohobate.teachers.load import load_tokenizer

    return load_tokenizer(first), load_tokenizer(second)


def _both(name_a: str, a: str | None, name_b: str, b: str | None) -> tuple[str, str] | tuple[()]:
    if a is not None and b is not None:
        return a, b
    if a is not None or b is not None:
        raise ConfigError(f"{name_a} and {name_b} come together; {name_b if b is None else name_a} is missing.")
    return ()


def _roles(given: list[str] | None) -> dict[str, str]:
    pairs = {}
    for text in given or []:
        student, equals, teacher = text.partition("=")
        if not (student and equals and teacher):
            raise ConfigError(f"--role {text!r}: wanted STUDENT_SPECIAL=TEACHER_SPECIAL.")
        pairs[student] = teacher
    return pairs


def _lengths(what: str, table: Any) -> str:
    counts = Counter(table.lengths().tolist())
    shares = [f"{n} {counts[n]}" for n in sorted(counts) if 0 < n < 4]
    long = sum(count for n, count in counts.items() if n >= 4)
    return f"{len(table)} {what}; ids of a chain: {', '.join(shares)}, 4 or more {long}; without a chain {counts[0]}"


def _rows(made: Any) -> str:
    exact, used = int(made.exact.sum()), int((made.indices[:, 0] >= 0).sum())
    total = made.student_vocab_size
    return f"{total} student tokens: {exact} exact, {used - exact} spread, {total - used} empty"


def _chunk_kinds(tokenizers: tuple[Any, Any], text: Path | None) -> str:
    from cohobate.align import align_tokens

    if text is not None and not text.is_file():
        raise ConfigError(f"--text {text}: there is no such file.")
    sample = SAMPLE if text is None else checked_text(text.read_bytes(), f"--text {text}")
    ids = [tokenizer(sample, add_special_tokens=False)["input_ids"] for tokenizer in tokenizers]
    chunks = list(align_tokens(tokenizers[0], ids[0], tokenizers[1], ids[1]))
    return f"{'a few lines of several scripts' if text is None else text}: {summary(chunks, len(ids[0]), len(ids[1]))}"
