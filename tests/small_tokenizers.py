# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of each supported kind, made in a moment: chat templates, added tokens that are not "special", BOS."""

from functools import cache

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content|trim + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "|>>")
TEXT = (
    "The quick brown fox jumps over the lazy dog. What is 12 + 30? It is 42.\n\nimport os\n    return x\n",
    "user assistant system im_start im_end think tool_call endoftext <|im_end|> <think> </think> < | > |> <|",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 日本語 русский 👍 é",
)


HEADED = (
    "<|begin|>{% for m in messages %}{{ '<|head|>' + m.role + '\n\n' + m.content|trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant\n\n' }}{% endif %}"
)


def bpe(
    *,
    ignore_merges: bool = False,
    size: int = 700,
    normalizer: object = None,
    special: tuple[str, ...] = SPECIAL,
    text: tuple[str, ...] = TEXT,
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text * 20, trainer)
    return tokenizer


@cache
def chat_tokenizer(
    template: str = CHATML, *, ignore_merges: bool = False, nfkc: bool = False
) -> PreTrainedTokenizerFast:
    """ByteLevel BPE with a ChatML template; `<think>` and others are added, not special. Shared: do not change it."""
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]) if nfkc else None
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe(ignore_merges=ignore_merges, normalizer=normalizer),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=nfkc) for token in ADDED])
    return tokenizer


@cache
def headed_tokenizer() -> PreTrainedTokenizerFast:
    """ByteLevel BPE of other merges and ids: NFC, a BOS, turns that end with another token than texts do."""
    special = ("<|begin|>", "<|end|>", "<|head|>", "<|eot|>", "<unused>")
    backend = bpe(size=340, normalizer=normalizers.NFC(), special=special, text=TEXT[1:])
    begin = backend.token_to_id("<|begin|>")
    backend.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[(special[0], begin)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>", chat_template=HEADED
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    return tokenizer


@cache
def sentencepiece_tokenizer(*, legacy: bool = False) -> PreTrainedTokenizerFast:
    """Byte fallback and `▁`, with BOS; the prefix space comes from the pre-tokenizer, or (legacy) the normaliser."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz<>/|",
    ]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", vocabulary["<s>"]), ("</s>", vocabulary["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template="{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}",
    )


def word_tokenizer(words: dict[str, int], *, eos: str = "<eos>") -> PreTrainedTokenizerFast:
    """A character or word vocabulary with the given ids."""
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, unk_token="<unk>")
