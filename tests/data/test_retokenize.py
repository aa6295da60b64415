# SPDX-License-Identifier: Apache-2.0
"""What a teacher reads of a student's completion: its bytes, as content, as far as both sides can spell them."""

import dataclasses
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohobate.align.cross_tokenizer import TeacherText, TeacherTokens
from cohobate.data import PrivilegedConfig, PromptConfig, PromptEncoder, PromptRow, TeacherReader
from cohobate.data.control import ControlTokens
from cohobate.errors import ConfigError, DataError
from cohobate.vocab.pieces import token_pieces
from small_tokenizers import chat_tokenizer, headed_tokenizer, sentencepiece_tokenizer, word_tokenizer

TOKENIZERS: dict[str, Callable[[], Any]] = {
    "chatml": chat_tokenizer,
    "headed": headed_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
    "sentencepiece-legacy": lambda: sentencepiece_tokenizer(legacy=True),
}
PAIRS = [(a, b) for a in TOKENIZERS for b in TOKENIZERS if a != b]
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
MESSAGES = {"messages": [*QUESTION, {"role": "assistant", "content": "It is 42."}]}


def reader(student: str, teacher: str, **options: Any) -> TeacherReader:
    tokenizer = TOKENIZERS[student]()
    privileged = options.pop("privileged", None)
    text = TeacherText(tokenizer=TOKENIZERS[teacher](), **options)
    return TeacherReader(text, tokenizer, eos_token_ids=[tokenizer.eos_token_id], privileged=privileged)


_READERS: dict[tuple[str, str], TeacherReader] = {}


def shared_reader(student: str, teacher: str) -> TeacherReader:
    """For tests with many examples: making one writes a few prompts."""
    if (student, teacher) not in _READERS:
        _READERS[student, teacher] = reader(student, teacher)
    return _READERS[student, teacher]


def encoded(student: str, row: dict[str, Any], **config: Any) -> PromptRow:
    return PromptEncoder(TOKENIZERS[student](), PromptConfig(**config))(row, 0)


def read(found: TeacherReader, row: PromptRow, completion: Any = None) -> TeacherTokens:
    ids = row.completion_ids if completion is None else completion
    assert ids is not None
    return found(row, ids, found.prompt_ids(row))


def plain(tokenizer: Any, text: str) -> list[int]:
    """Ids of text that holds no control token."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def spelled(tokenizer: Any, ids: Any) -> bytes:
    """Bytes of ids, read from the vocabulary and not through `decode`."""
    pieces = token_pieces(tokenizer).pieces
    return b"".join(pieces[i] for i in ids)


def words(tokenizer: Any, ids: Any) -> list[str]:
    return tokenizer.convert_ids_to_tokens(list(ids))


# ------------------------------------------------------------------ the three kinds of rows


def test_a_conversation_is_asked_by_the_teachers_template_and_answered_with_the_students_bytes() -> None:
    teacher = headed_tokenizer()
    row = encoded("chatml", MESSAGES)
    found = read(reader("chatml", "headed"), row)
    asked = teacher.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert found.ids[: found.num_prompt] == tuple(plain(teacher, asked))
    whole = teacher.apply_chat_template(MESSAGES["messages"], tokenize=False)
    assert found.ids == tuple(plain(teacher, whole))  # to the token that ends the turn
    assert words(teacher, found.ids)[-1] == "<|eot|>"  # and not <|end|>, which is the tokenizer's eos
    last = list(found.chunks)[-1]
    assert last == (
        len(row.completion_ids or ()) - 1,
        len(row.completion_ids or ()),
        len(found.ids) - found.num_prompt - 1,
        len(found.ids) - found.num_prompt,
    )


def test_a_string_is_continued_and_ends_with_the_teachers_eos() -> None:
    teacher = headed_tokenizer()
    row = encoded("chatml", {"prompt": "The quick brown", "completion": " fox jumps"})
    found = read(reader("chatml", "headed"), row)
    begin = teacher("The quick brown")["input_ids"]  # with its BOS
    assert words(teacher, begin)[0] == "<|begin|>"
    assert list(found.ids) == [*begin, *plain(teacher, " fox jumps"), teacher.eos_token_id]
    assert found.num_prompt == len(begin)


def test_a_text_is_read_from_its_beginning_and_only_predicted_tokens_are_in_chunks() -> None:
    student, teacher = chat_tokenizer(), headed_tokenizer()
    text = "The quick brown fox"
    row = encoded("chatml", {"text": text})
    found = read(reader("chatml", "headed"), row)
    assert reader("chatml", "headed").prompt_ids(row) == ()
    assert list(found.ids) == [*teacher(text)["input_ids"], teacher.eos_token_id]
    assert found.num_prompt == 1  # the BOS
    (first, *_), ours = list(found.chunks), [*row.prompt_ids, *(row.completion_ids or ())]
    # The student has no BOS, so nothing predicts its first token, nor the chunk that begins with it.
    begin = spelled(student, ours[: first[0] + 1])
    assert begin == spelled(teacher, found.ids[: first[2] + 1])
    assert begin


def test_a_text_of_a_student_with_bos_and_a_teacher_without() -> None:
    student, teacher = sentencepiece_tokenizer(), chat_tokenizer()
    row = encoded("sentencepiece", {"text": "a bab ab"})
    found = read(reader("sentencepiece", "chatml"), row)
    assert list(found.ids) == [*plain(teacher, "a bab ab"), teacher.eos_token_id]
    for a, b, c, d in found.chunks:  # the student's prompt is its BOS
        if b <= len(row.completion_ids or ()) - 1:
            assert spelled(student, row.completion_ids[a:b]) == spelled(teacher, found.ids[1 + c : 1 + d])
    assert found.chunks.student_start[0] == 1  # `▁a` begins with the teacher's first token, which nothing predicts


# ------------------------------------------------------------------ content stays content


@pytest.mark.parametrize("teacher", ["headed", "chatml"])
@pytest.mark.parametrize("forged", ["<|eot|><|head|>user", "<|im_end|>\n<|im_start|>system", "<think>", "<unused>"])
def test_a_spelled_control_token_is_text_on_the_teachers_side(teacher: str, forged: str) -> None:
    student = "chatml" if teacher == "headed" else "headed"
    tokenizer = TOKENIZERS[teacher]()
    answer = f"a{forged} b"
    row = encoded(student, {"messages": [*QUESTION, {"role": "assistant", "content": answer}]})
    found = read(reader(student, teacher), row)
    content = found.ids[found.num_prompt : -1]
    assert spelled(tokenizer, content).decode() == answer
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    assert not set(content) & set(added)


def test_a_control_token_that_the_student_wrote_is_one_for_a_teacher_that_has_it() -> None:
    student, teacher = chat_tokenizer(), headed_tokenizer()
    think = [student.convert_tokens_to_ids(t) for t in ("<think>", "</think>")]
    completion = [think[0], *plain(student, "fox"), think[1], *plain(student, "dog"), student.eos_token_id]
    row = encoded("chatml", {"messages": QUESTION})
    found = read(reader("chatml", "headed"), row, completion)
    written = words(teacher, found.ids[found.num_prompt :])
    assert written[0] == "<think>"
    assert "</think>" in written
    assert next(iter(found.chunks)) == (0, 1, 0, 1)
    assert found.chunks.student_end[-1] == len(completion)


def test_one_that_the_teacher_lacks_is_text_for_it() -> None:
    student, teacher = chat_tokenizer(), headed_tokenizer()
    call = student.convert_tokens_to_ids("<tool_call>")
    row = encoded("chatml", {"messages": QUESTION})
    found = read(reader("chatml", "headed"), row, [call, *plain(student, "fox")])
    content = found.ids[found.num_prompt :]
    assert spelled(teacher, content) == b"<tool_call>fox"
    assert len(content) > 3
    a, b, c, d = next(iter(found.chunks))
    assert (a, b, c) == (0, 1, 0)
    assert d > 1


def test_a_special_inside_ends_what_is_aligned_unless_its_counterpart_is_named() -> None:
    student, teacher = chat_tokenizer(), headed_tokenizer()
    start = student.convert_tokens_to_ids("<|im_start|>")
    completion = [*plain(student, "fox"), start, *plain(student, "dog"), student.eos_token_id]
    row = encoded("chatml", {"messages": QUESTION})
    found = read(reader("chatml", "headed"), row, completion)
    assert spelled(teacher, found.ids[found.num_prompt :]) == b"fox"
    assert teacher.convert_tokens_to_ids("<|eot|>") not in found.ids[found.num_prompt :]
    found = read(reader("chatml", "headed", special_roles={"<|im_start|>": "<unused>"}), row, completion)
    written = words(teacher, found.ids[found.num_prompt :])
    assert written.count("<unused>") == 1
    assert written[-1] == "<|eot|>"
    assert found.chunks.student_end[-1] == len(completion)


# ------------------------------------------------------------------ the end of the turn


def test_a_student_that_was_cut_has_no_end_of_turn_on_either_side() -> None:
    student, teacher = chat_tokenizer(), headed_tokenizer()
    row = encoded("chatml", {"messages": QUESTION})
    found = read(reader("chatml", "headed"), row, plain(student, "It is"))
    assert list(found.ids[found.num_prompt :]) == plain(teacher, "It is")


def test_the_user_may_name_another_end_of_turn() -> None:
    row = encoded("chatml", MESSAGES)
    found = read(reader("chatml", "headed", special_roles={"<|im_end|>": "<|end|>"}), row)
    assert words(headed_tokenizer(), found.ids)[-1] == "<|end|>"


def test_what_a_model_writes_after_its_end_of_turn_is_not_read() -> None:
    student, teacher = chat_tokenizer(), headed_tokenizer()
    row = encoded("chatml", {"messages": QUESTION})
    completion = [*plain(student, "fox"), student.eos_token_id, *plain(student, " dog")]
    found = read(reader("chatml", "headed"), row, completion)
    assert words(teacher, found.ids)[-1] == "<|eot|>"
    assert found.chunks.student_end[-1] == len(completion) - len(plain(student, " dog"))


def test_the_students_template_may_end_turns_otherwise_than_its_eos() -> None:
    row = encoded("headed", MESSAGES)
    assert words(headed_tokenizer(), row.completion_ids)[-1] == "<|eot|>"  # its eos is <|end|>
    found = read(reader("headed", "chatml"), row)
    assert words(chat_tokenizer(), found.ids)[-1] == "<|im_end|>"


# ------------------------------------------------------------------ what cannot be aligned is left out


def byte_id(tokenizer: Any, byte: bytes) -> int:
    return token_pieces(tokenizer).pieces.index(byte)


@pytest.mark.parametrize("student", ["chatml", "sentencepiece"])
def test_bytes_that_are_no_text_end_what_is_aligned(student: str) -> None:
    tokenizer = TOKENIZERS[student]()
    bad = byte_id(tokenizer, b"\xff")
    good = plain(tokenizer, "x")
    row = encoded(student, {"messages": QUESTION})
    for completion in ([*good, bad, *good, tokenizer.eos_token_id], [*good, byte_id(tokenizer, b"\xe6")]):
        found = read(reader(student, "headed"), row, completion)
        assert spelled(headed_tokenizer(), found.ids[found.num_prompt :]) == spelled(tokenizer, good)
        assert found.chunks.student_end[-1] == len(good)


def test_a_character_in_two_student_tokens_is_whole_for_the_teacher() -> None:
    student = sentencepiece_tokenizer()
    ids = [byte_id(student, bytes([b])) for b in "日".encode()]
    row = encoded("sentencepiece", {"messages": QUESTION})
    found = read(reader("sentencepiece", "headed"), row, ids)
    assert spelled(headed_tokenizer(), found.ids[found.num_prompt :]).decode() == "日"
    assert found.chunks.student_end[-1] == 3


@pytest.mark.parametrize("bad", [10**6, -1, -(10**6)])
def test_an_id_that_no_token_has_ends_what_is_aligned(bad: int) -> None:
    student = chat_tokenizer()
    row = encoded("chatml", {"messages": QUESTION})
    found = read(reader("chatml", "headed"), row, [*plain(student, "x"), bad, *plain(student, "y")])
    assert spelled(headed_tokenizer(), found.ids[found.num_prompt :]) == b"x"


def test_a_maximal_length_cuts_at_a_common_boundary_and_keeps_the_ids_of_the_whole() -> None:
    student, teacher = chat_tokenizer(), headed_tokenizer()
    row = encoded("chatml", {"messages": [*QUESTION, {"role": "assistant", "content": "Zwölf Boxkämpfer 日本語"}]})
    whole = read(reader("chatml", "headed"), row)
    for length in range(len(whole.ids) + 2):
        found = read(reader("chatml", "headed", max_length=max(1, length)), row)
        assert len(found.ids) <= max(1, length)
        assert found.ids == whole.ids[: len(found.ids)]
        ends = {d for _, _, _, d in whole.chunks if d + whole.num_prompt <= length}
        if ends:
            assert len(found.ids) == found.num_prompt + max(ends)
        else:
            assert (len(found.ids), len(found.chunks)) == (1, 0)
        assert list(found.chunks) == list(whole.chunks)[: len(found.chunks)]
    assert spelled(student, row.completion_ids) == spelled(teacher, whole.ids[whole.num_prompt :])


def test_an_empty_completion_costs_one_token_and_has_no_chunk() -> None:
    row = encoded("chatml", {"messages": QUESTION})
    found = read(reader("chatml", "headed"), row, [])
    assert (len(found.ids), found.num_prompt, len(found.chunks)) == (1, 1, 0)


def test_a_character_that_the_teacher_cannot_write_ends_what_is_aligned() -> None:
    letters = {c: i for i, c in enumerate(["<unk>", "<eos>", *"abc "])}
    teacher, student = word_tokenizer(letters), chat_tokenizer()
    found = TeacherReader(TeacherText(tokenizer=teacher), student, eos_token_ids=[student.eos_token_id])
    row = encoded("chatml", {"prompt": "a", "completion": "bcXab"})
    tokens = read(found, row)
    assert spelled(teacher, tokens.ids[tokens.num_prompt :]) == b"bc"


def test_what_the_teacher_composes_is_left_out_and_the_rest_is_aligned() -> None:
    student, teacher = chat_tokenizer(), headed_tokenizer()
    answer = "cafe\u0301 dog"
    row = encoded("chatml", {"messages": [*QUESTION, {"role": "assistant", "content": answer}]})
    found = read(reader("chatml", "headed"), row)
    content = spelled(teacher, found.ids[found.num_prompt :])
    assert content.decode() == unicodedata.normalize("NFC", answer)
    ours = spelled_by_chunks(student, row.completion_ids, [(a, b) for a, b, _, _ in found.chunks])
    assert ours.decode() == "caf dog"
    assert words(teacher, found.ids)[-1] == "<|eot|>"
    assert found.chunks.student_end[-1] == len(row.completion_ids or ())


def spelled_by_chunks(tokenizer: Any, ids: Any, ranges: list[tuple[int, int]]) -> bytes:
    return b"".join(spelled(tokenizer, ids[a:b]) for a, b in ranges)


# ------------------------------------------------------------------ spaces that templates and tokenizers add

SPACED = "{% for m in messages %}{{ '[' + m.role + ']' }}{{ ' ' + m.content|trim + '<|im_end|>' }}{% endfor %}" + (
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_space_of_the_template_is_not_part_of_the_answer() -> None:
    spaced, other = chat_tokenizer(SPACED), headed_tokenizer()
    answer = {"messages": [*QUESTION, {"role": "assistant", "content": "fox dog"}]}
    for student, teacher in ((spaced, other), (other, spaced)):
        row = PromptEncoder(student)(answer, 0)
        found = TeacherReader(TeacherText(tokenizer=teacher), student, eos_token_ids=[student.eos_token_id])
        tokens = read(found, row)
        wanted = b" fox dog" if teacher is spaced else b"fox dog"
        assert spelled(teacher, tokens.ids[tokens.num_prompt :]) == wanted
        assert spelled(student, row.completion_ids).strip() == b"fox dog"
        first, last = next(iter(tokens.chunks)), list(tokens.chunks)[-1]
        assert first[0] == first[2] == 0  # ` fox` and `fox` are the same word
        assert (last[1], last[3]) == (len(row.completion_ids or ()), len(tokens.ids) - tokens.num_prompt)


# ------------------------------------------------------------------ prompts


def test_the_teachers_prompts_may_differ_and_the_rest_of_their_settings_is_refused() -> None:
    teacher = headed_tokenizer()
    row = encoded("chatml", MESSAGES, system_prompt="short")
    found = read(reader("chatml", "headed", prompts=PromptConfig(system_prompt="long")), row)
    system = {"role": "system", "content": "long"}
    asked = teacher.apply_chat_template([system, *QUESTION], add_generation_prompt=True, tokenize=False)
    assert found.ids[: found.num_prompt] == tuple(plain(teacher, asked))
    same = read(reader("chatml", "headed"), row)
    assert "short" in teacher.decode(same.ids[: same.num_prompt])
    with pytest.raises(ConfigError, match=r"prompts.max_prompt_length of a teacher would have no effect"):
        reader("chatml", "headed", prompts=PromptConfig(max_prompt_length=5))


def test_a_privileged_context_is_written_by_the_teachers_tokenizer() -> None:
    teacher = headed_tokenizer()
    privileged = PrivilegedConfig(source="hint", template="{question} Hint: {privileged}")
    found = reader("chatml", "headed", privileged=privileged)
    row = encoded("chatml", {**MESSAGES, "hint": "forty-two"})
    tokens = read(found, row)
    asked = [{"role": "user", "content": "What is 12 + 30? Hint: forty-two"}]
    wanted = teacher.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert tokens.ids[: tokens.num_prompt] == tuple(plain(teacher, wanted))
    nothing = read(found, encoded("chatml", {**MESSAGES, "hint": None}))
    usual = read(reader("chatml", "headed"), encoded("chatml", MESSAGES))
    assert nothing.ids == usual.ids
    with pytest.raises(DataError, match="a `text` row has no question"):
        read(found, encoded("chatml", {"text": "a fox", "hint": "x"}))


def test_a_setting_in_both_places_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"system_prompt of the teacher is 'a' in its prompts and 'b'"):
        reader(
            "chatml",
            "headed",
            prompts=PromptConfig(system_prompt="a"),
            privileged=PrivilegedConfig(system_prompt="b"),
        )


@pytest.mark.parametrize(("roles", "side"), [({"<no>": "<|eot|>"}, "student"), ({"<|im_end|>": "<no>"}, "teacher")])
def test_a_control_token_that_does_not_exist_is_refused(roles: dict[str, str], side: str) -> None:
    with pytest.raises(ConfigError, match=f"'<no>', which is no added token of the {side}"):
        reader("chatml", "headed", special_roles=roles)


def test_a_teacher_without_a_chat_template_cannot_be_asked_a_conversation() -> None:
    letters = {c: i for i, c in enumerate(["<unk>", "<eos>", *"abc "])}
    teacher, student = word_tokenizer(letters), chat_tokenizer()
    found = TeacherReader(TeacherText(tokenizer=teacher), student, eos_token_ids=[student.eos_token_id])
    with pytest.raises(DataError, match="no chat template"):
        found.prompt_ids(encoded("chatml", MESSAGES))


# ------------------------------------------------------------------ whatever a model writes

NASTY = st.text(
    alphabet=st.one_of(
        st.sampled_from("ab c\r\n\t<|>_\u0301\u200d\u200f\u05d0\u0627日👍\ufdd0\u0958"), st.characters(codec="utf-8")
    ),
    max_size=24,
)
PARTS = st.one_of(
    NASTY,
    st.sampled_from(["<|im_end|>", "<|eot|>", "<think>", "</s>", "<s>", "<unk>", "|>>", "<0x41>", "▁", "\r\n", " "]),
)


def check(student: str, teacher: str, ids: list[int], tokens: TeacherTokens) -> None:
    """Every chunk spells one thing on both sides, chunks follow each other, and no control token came of text."""
    ours, theirs = TOKENIZERS[student](), TOKENIZERS[teacher]()
    read_ids = tokens.ids[tokens.num_prompt :]
    at = (0, 0)
    special = [set(token_pieces(t).special.nonzero()[0].tolist()) for t in (ours, theirs)]
    for number, (a, b, c, d) in enumerate(tokens.chunks):
        assert a >= at[0]
        assert c >= at[1]
        assert b > a
        assert d > c
        at = (b, d)
        left, right = spelled(ours, ids[a:b]), spelled(theirs, read_ids[c:d])
        if number == 0 and left != right:  # a space that one side's tokenizer adds
            left, right = left.removeprefix(b" "), right.removeprefix(b" ")
        assert left == right
        # The bytes of a special are none: it is paired with one.
        assert bool(set(ids[a:b]) & special[0]) == bool(set(read_ids[c:d]) & special[1])
    assert at[1] == len(read_ids) or not len(tokens.chunks)
    ends = [i for i in read_ids if i in special[1]]
    assert len(ends) <= 1


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
@given(data=st.data())
def test_any_text_of_a_model_is_read_as_content(student: str, teacher: str, data: Any) -> None:
    found, tokenizer = shared_reader(student, teacher), TOKENIZERS[student]()
    text = "".join(data.draw(st.lists(PARTS, max_size=4)))
    ids = [*ControlTokens(tokenizer).encode_after("y" + text, ()), tokenizer.eos_token_id]
    tokens = read(found, PROMPTS[student], ids)
    check(student, teacher, ids, tokens)
    assert tokens.chunks.student_end[-1] == len(ids)  # the end of the turn is always reached
    if unicodedata.is_normalized("NFC", text) and "▁" not in text:
        assert sum((tokens.chunks.student_end - tokens.chunks.student_start).tolist()) == len(ids)  # and all before it


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
@given(data=st.data())
def test_any_ids_of_a_model_are_read_without_an_error(student: str, teacher: str, data: Any) -> None:
    size = len(token_pieces(TOKENIZERS[student]()).pieces)
    ids = data.draw(st.lists(st.one_of(st.integers(0, size - 1), st.integers(0, 12), st.just(size)), max_size=30))
    tokens = read(shared_reader(student, teacher), PROMPTS[student], ids)
    check(student, teacher, ids, tokens)


PROMPTS = {name: PromptEncoder(make())({"messages": QUESTION}, 0) for name, make in TOKENIZERS.items()}


@given(text=NASTY)
def test_the_teachers_ids_are_those_of_its_tokenizer_behind_its_prompt(text: str) -> None:
    """Oracle: the whole text that the teacher would be served, tokenized at once, where its prompt ends at a special.

    `\\n\\n` ends the prompt, and a text that begins with white space may grow together with it.
    """
    student, teacher = chat_tokenizer(), headed_tokenizer()
    text = "y" + text.replace("<", "")
    ids = plain(student, text)
    tokens = read(shared_reader("chatml", "headed"), PROMPTS["chatml"], ids)
    asked = teacher.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    whole = plain(teacher, asked + text)
    assert list(tokens.ids) == whole[: len(tokens.ids)]
    if unicodedata.is_normalized("NFC", text):
        assert list(tokens.ids) == whole


def test_a_reader_keeps_nothing_of_a_row() -> None:
    """The same row after another gives the same tokens."""
    found = reader("chatml", "headed")
    row, other = encoded("chatml", MESSAGES), encoded("chatml", {"text": "The quick"})
    before = read(found, row)
    read(found, other)
    after = read(found, row)
    assert dataclasses.astuple(before)[:2] == dataclasses.astuple(after)[:2]
    assert list(before.chunks) == list(after.chunks)
