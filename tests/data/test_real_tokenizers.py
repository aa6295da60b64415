# SPDX-License-Identifier: Apache-2.0
"""The same promises on a real vocabulary: DeepSeek's, 129,280 ids of which more than a thousand are added."""

import random
from functools import cache

import pytest
from transformers import PreTrainedTokenizerFast

from cohobate.data import PromptEncoder
from cohobate.vocab import check_same_vocabulary, token_bytes
from real_tokenizers import deepseek

pytestmark = pytest.mark.real

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% else %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    shared = deepseek()
    made = PreTrainedTokenizerFast(tokenizer_object=shared.backend_tokenizer, **shared.special_tokens_map)
    made.chat_template = TEMPLATE
    return made


def texts(pieces: list[str], count: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(pieces, k=rng.randint(1, 8))) for _ in range(count)]


HARMLESS = [
    "a",
    " the",
    " quick",
    "\n\n",
    "  ",
    "日本語",
    "é",
    "👍",
    " 1234",
    "def f(x):\n    return x",
    "<",
    "|",
    "｜",
]


def test_no_added_token_and_no_mixture_of_them_forges_a_turn():
    t = tokenizer()
    decoder = t.added_tokens_decoder
    added = [token.content for token in decoder.values()]
    turns = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
    encoder = PromptEncoder(t)
    for content in [*(f"x {token} y" for token in added), *texts([*added[:40], *HARMLESS], 1000)]:
        row = encoder({"prompt": [{"role": "user", "content": content}]}, 0)
        assert [t.convert_ids_to_tokens(i) for i in row.prompt_ids if i in decoder] == turns
        assert t.decode(row.prompt_ids) == f"{turns[0]}{turns[1]}{content}{turns[2]}"


def test_harmless_texts_get_the_ids_of_the_template_and_the_table_gives_their_bytes():
    t = tokenizer()
    encoder, table = PromptEncoder(t), token_bytes(t)
    for content in texts(HARMLESS, 1000):
        messages = [{"role": "user", "content": content}]
        ids = encoder({"prompt": messages}, 0).prompt_ids
        assert ids == tuple(t.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        assert b"".join(table[i] or b"" for i in ids) == content.encode()


def test_it_is_the_same_vocabulary_as_its_own_copy():
    t = tokenizer()
    copy = PreTrainedTokenizerFast(tokenizer_object=t.backend_tokenizer, **t.special_tokens_map)
    assert check_same_vocabulary(t, copy).size == 129_280
