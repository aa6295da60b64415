# SPDX-License-Identifier: Apache-2.0
"""From a path to a model with its own tokenizer."""

from pathlib import Path
from typing import Any

import pytest

import tiny
from cohobate.trainer import resolve


@pytest.mark.parametrize("kind", [str, Path])
def test_a_model_by_its_path_comes_with_its_tokenizer(tmp_path: Path, kind: type) -> None:
    tiny.llama(5).save_pretrained(tmp_path)
    tiny.char_tokenizer().save_pretrained(tmp_path)
    wanted = tiny.char_tokenizer().get_vocab()
    model, tokenizer = resolve.student(kind(tmp_path), None, None, None)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert tokenizer.get_vocab() == wanted
    model, tokenizer = resolve.loaded_teacher(kind(tmp_path), None)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert tokenizer.get_vocab() == wanted


def test_the_tokenizer_is_of_the_revision_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(resolve, "load_tokenizer", lambda path, **options: asked.append((path, options)))
    monkeypatch.setattr(resolve, "resolve_model", lambda *args, **options: tiny.llama(5))
    resolve.loaded_teacher("org/name", {"revision": "v2", "dtype": "float32"})
    assert asked == [("org/name", {"revision": "v2"})]
