# SPDX-License-Identifier: Apache-2.0
"""`cohobate align`: two tokenizers over the same bytes."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cohobate.errors import ConfigError

KINDS = ("1:1", "1:n", "n:1", "m:n")


def align(
    text: Annotated[str, typer.Argument(help="The text, or - to read it from standard input.", metavar="TEXT")],
    student: Annotated[str, typer.Option("--student", "-s", help="Folder or name of a model or tokenizer.")],
    teacher: Annotated[str, typer.Option("--teacher", "-t", help="The same for the other side.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also draw it into this .svg or .html file.")
    ] = None,
) -> None:
    """Draw how two tokenizers spell one text.

    Chunks are the finest pieces whose ends both sides share; they are what CSD
    and X-Token compare. Fast ByteLevel BPE, SentencePiece-style and character
    tokenizers can be read; one that changes the text (lower-casing, NFKC) is
    refused.

    [bold]Examples[/bold]

    [cyan]cohobate align "It costs 1234 €" -s smollm2-135m-instruct -t DIR[/cyan]
    [cyan]cohobate align - -s DIR1 -t DIR2 -o chunks.svg < page.txt[/cyan]
    """
    from rich.console import Console

    from cohobate.align import align_tokens
    from cohobate.cli import drawing
    from cohobate.teachers.load import load_tokenizer
    from cohobate.vocab.pieces import token_pieces

    if output is not None and output.suffix not in (".svg", ".html"):
        raise ConfigError(f"--output {output}: a drawing is an .svg or .html file.")
    if output is not None:
        check_output(output)
    text = checked_text(sys.stdin.buffer.read() if text == "-" else os.fsencode(text), "the text")
    tokenizers = load_tokenizer(student), load_tokenizer(teacher)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for tokenizer in tokenizers]
    chunks = align_tokens(tokenizers[0], ids[0], tokenizers[1], ids[1])
    tokens = []
    for tokenizer, row in zip(tokenizers, ids, strict=True):
        pieces = token_pieces(tokenizer)
        tokens.append(
            ["|".join(sorted(pieces.roles[i])) if i in pieces.roles else drawing.shown(pieces.pieces[i]) for i in row]
        )
    found = drawing.columns(tokens[0], tokens[1], list(chunks))
    console = Console(file=sys.stdout, highlight=False)
    for line in drawing.terminal(found, console.width):
        console.print(line, soft_wrap=True)
    print(summary(list(chunks), len(ids[0]), len(ids[1])))
    if output is not None:
        picture = drawing.svg(found, student="student", teacher="teacher")
        if output.suffix == ".html":
            picture = f'<!doctype html>\n<meta charset="utf-8">\n<title>Two segmentations</title>\n{picture}'
        output.write_text(picture, encoding="utf-8")
        print(f"written: {output}")


def check_output(path: Path) -> None:
    """Raise ConfigError unless a file can be written at `path`, before there is anything to write."""
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {path.parent}. Make it first, or name another.")
    if path.is_dir():
        raise ConfigError(f"--output {path}: that is a folder. Name a file in it.")


def checked_text(content: bytes, name: str) -> str:
    """`content` as text; ConfigError if it is none."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is no UTF-8 text ({error}). Convert it first.") from error


def summary(chunks: list[tuple[int, int, int, int]], num_student: int, num_teacher: int) -> str:
    """Tokens, chunks and kinds in one line."""
    counts = dict.fromkeys(KINDS, 0)
    for s0, s1, t0, t1 in chunks:
        counts[KINDS[2 * (s1 - s0 > 1) + (t1 - t0 > 1)]] += 1
    total = max(1, len(chunks))
    kinds = ", ".join(f"{kind} {count} ({count / total:.0%})" for kind, count in counts.items() if count)
    apart_s = num_student - sum(s1 - s0 for s0, s1, _, _ in chunks)
    apart_t = num_teacher - sum(t1 - t0 for _, _, t0, t1 in chunks)
    apart = f"; in no chunk: {apart_s} student, {apart_t} teacher tokens" if apart_s or apart_t else ""
    return (
        f"{num_student} student tokens, {num_teacher} teacher tokens, {len(chunks)} chunks: {kinds or 'none'}{apart}"
    )
