# SPDX-License-Identifier: Apache-2.0
"""`cohobate eval`: how many rows a model gets right."""

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cohobate.errors import ConfigError

if TYPE_CHECKING:
    from cohobate.cli.scoring import Settings


def evaluate(
    model: Annotated[str, typer.Argument(help="A folder, or a name such as smollm2-135m-instruct.", metavar="MODEL")],
    data: Annotated[
        str, typer.Option("--data", "-d", help="Rows: .jsonl, .json, .parquet or .csv file, or a folder.")
    ],
    grader: Annotated[
        str, typer.Option("--grader", "-g", help="exact_match, final_answer, math_verify or reasoning_gym.")
    ],
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="Folder of a LoRA adapter to put on the model.")
    ] = None,
    split: Annotated[str | None, typer.Option("--split", help="Which split, where the data has several.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many rows.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest completion.")] = 256,
    sampling_temperature: Annotated[
        float, typer.Option("--sampling-temperature", "-t", min=0.0, help="0 takes the likeliest token.")
    ] = 0.0,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Rows decoded together.")] = 16,
    chat: Annotated[
        bool, typer.Option("--chat", help="A prompt that is a string becomes a user's turn of a conversation.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16 or float16; default: the file's.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the sampling; unused at temperature 0.")] = 42,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON with the result and every completion.")
    ] = None,
) -> None:
    """Measure a model's accuracy on rows with a known answer.

    Every row has a [cyan]prompt[/cyan] (or [cyan]messages[/cyan]) and the right [cyan]answer[/cyan]. The model
    writes one completion, and a grader says whether it is right:

    [cyan]exact_match[/cyan]    the completion is the answer
    [cyan]final_answer[/cyan]   what it commits to is the answer: boxed, after "####" or "the
                   answer is", else the last number
    [cyan]math_verify[/cyan]    the same answer mathematically; needs the extra math
    [cyan]reasoning_gym[/cyan]  the task's own scorer; needs the extra smollm2

    [bold]Examples[/bold]

    [cyan]cohobate eval runs/opd -d test.jsonl -g final_answer -o opd.json[/cyan]
    [cyan]cohobate eval smollm2-135m-instruct --chat -d test.jsonl -g final_answer[/cyan]
    """
    from cohobate.cli.scoring import Settings, score

    settings = Settings(
        model=model,
        adapter=adapter,
        data=data,
        split=split,
        limit=limit,
        grader=grader,
        max_new_tokens=max_new_tokens,
        sampling_temperature=sampling_temperature,
        batch_size=batch_size,
        chat=chat,
        dtype=dtype,
        seed=seed,
    )
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}. Make it first, or name another.")
    result = score(settings)
    print(
        f"accuracy {result.accuracy:.1%} ± {result.standard_error:.1%} "
        f"({result.num_right:g} of {result.num_rows} rows; {result.num_truncated} cut at {max_new_tokens} tokens, "
        f"mean length {result.mean_length:.1f})"
    )
    if output is not None:
        write_json(output, {"settings": _plain(settings), **result.as_dict()})
        print(f"written: {output}")


def _plain(settings: "Settings") -> dict[str, Any]:
    return {name: str(v) if isinstance(v, Path) else v for name, v in settings.as_dict().items()}


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file so that a reader sees the old one or the new one, never half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
