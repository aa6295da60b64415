# SPDX-License-Identifier: Apache-2.0
"""What to type to have a store made anew, for what a run asks now and not for what was asked when it was made.

A store remembers the command that made it. Where a recipe reads the store, its data and prompts are the ones to be
scored, so the command names the recipe, and of the old one only what concerns the teacher is kept. Elsewhere the files
that a run reads are not known here: the old command is given, and `ANEW` says so.
"""

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from cohobate.teachers.store_format import Header

NEW_FOLDER = "NEW_FOLDER"
ANEW = "Score what this run reads into a new folder"

_FLAGS = ("--compact", "--own-tokenizer", "--chat")  # options without a value
_OF_TEACHER = ("--max-length", "--dtype", "--revision", "--batch-tokens", "--shard-rows")
_OWN = ("--own-tokenizer", "--role", "--max-length")


def anew(
    made_by: Sequence[str],
    header: Header,
    *,
    run: Sequence[str] = (),
    own_tokenizer: bool | None = None,
    **changed: Any,
) -> str:
    """A command for a shell.

    Args:
        made_by: the words of the command that made the store.
        run: `--recipe NAME KEY=VALUE ...` of the run that reads it, with `--teacher` if the recipe's name of the model
            is known; empty: not a recipe's.
        own_tokenizer: whether the teacher is to read its own tokens; None: as it did.
        changed: `top_k` and `temperature`, if other ones are wanted.
    """
    options, changes = _options(made_by)
    if own_tokenizer is False:
        options = [(name, value) for name, value in options if name not in _OWN]
    wanted = {"--top-k": str(changed.get("top_k", header.top_k))}
    temperature = changed.get("temperature", header.temperature)
    wanted |= {"--distill-temperature": f"{temperature:g}"} if temperature != 1 or "temperature" in changed else {}
    if run:
        named, changes = _options(run)
        given = dict(options) | dict(named)
        teacher = given.get("--teacher") or _model_in(_options(made_by)[1]) or "MODEL"
        kept = [(name, value) for name, value in options if name in (*_OF_TEACHER, "--compact")]
        options = [("--recipe", given["--recipe"]), ("--teacher", teacher), *kept]
    elif not made_by:
        options = [("--teacher", "MODEL"), ("--data", "ROWS")]
    elif own_tokenizer and ("--own-tokenizer", None) not in options:
        options.append(("--own-tokenizer", None))
    options = [(name, value) for name, value in options if name not in wanted] + list(wanted.items())
    words = [word for option in options for word in option if word is not None]
    return shlex.join(["cohobate", "score", *words, *changes, "--output", NEW_FOLDER])


def files_note(made_by: Sequence[str], run: Sequence[str]) -> str:
    """What to say beside a command that may name other files than the run reads."""
    names = [value for name, value in _options(made_by)[0] if name == "--data" and value is not None]
    return "" if run or not names else f", with its files in place of {', '.join(names)}"


def _options(words: Sequence[str]) -> tuple[list[tuple[str, str | None]], list[str]]:
    """Options of `cohobate score` in order, and its `KEY=VALUE` arguments."""
    options: list[tuple[str, str | None]] = []
    changes: list[str] = []
    rest: Iterator[str] = iter(words[2:] if list(words[:2]) == ["cohobate", "score"] else words)
    for word in rest:
        if not word.startswith("--"):
            changes.append(word)
        else:
            options.append((word, None if word in _FLAGS else next(rest, None)))
    return options, changes


def _model_in(changes: Sequence[str]) -> str | None:
    """The model that the changes of a recipe name as its one teacher."""
    found = [value for key, _, value in (change.partition("=") for change in changes) if key in _MODEL_KEYS]
    return found[0] if len(found) == 1 else None


_MODEL_KEYS = ("teacher.model", "teachers.0.model")
