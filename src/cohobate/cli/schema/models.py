# SPDX-License-Identifier: Apache-2.0
"""Student and teachers: which weights, and where they are."""

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from cohobate.cli.schema.section import Section
from cohobate.cli.schema.server import Reached

Dtype = Literal["float32", "bfloat16", "float16"]


class Lora(Section):
    """A LoRA adapter on the student; needs the extra `peft`."""

    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: str | list[str] = "all-linear"


class Student(Section):
    """The model that is trained: a folder, or a name that `load_model` knows."""

    model: str
    tokenizer: str | None = None
    dtype: Dtype | None = None
    attn_implementation: str | None = None
    lora: Lora | None = None


class LocalTeacher(Section):
    """Another model over the same vocabulary."""

    kind: Literal["local"]
    model: str
    tokenizer: str | None = None
    dtype: Dtype | None = None
    attn_implementation: str | None = None


class FrozenTeacher(Section):
    """A copy of the student as it was at the start."""

    kind: Literal["frozen"]


class EMATeacher(Section):
    """A moving average of the student, from its initial weights."""

    kind: Literal["ema"]
    decay: float = Field(ge=0, lt=1)


class AdapterOffTeacher(Section):
    """The student with its LoRA adapter switched off: no second copy in memory."""

    kind: Literal["adapter_off"]


class LiveTeacher(Section):
    """The student itself, as it is now."""

    kind: Literal["live"]


class StoredTeacher(Section):
    """Scores that `cohobate score` wrote for the recorded completions of these very rows."""

    kind: Literal["stored"]
    path: str
    model: str | None = None  # what `cohobate score --recipe` asks; the run itself needs none
    tokenizer: str | None = None  # None: the student's
    top_k: int | None = Field(default=None, ge=1)  # fewer ids than the store has


class ServerTeacher(Reached):
    """A teacher on a vLLM server. Which ids are compared follows from these settings and `objective.beta`."""

    kind: Literal["server"]
    teacher_model_server_url: str
    model: str | None = None  # its name there, if the server has several
    loss_top_k: int = 1
    loss_add_tail: bool = True
    reverse_kl_top_1_mode: Literal["sampled", "argmax"] = "sampled"


Teacher = Annotated[
    LocalTeacher | FrozenTeacher | EMATeacher | AdapterOffTeacher | LiveTeacher | StoredTeacher | ServerTeacher,
    Field(discriminator="kind"),
]


class Aligner(Section):
    """How a teacher's tokenizer relates to the student's. Built at the start, or read from what the commands wrote."""

    subtokens: str | None = None  # for objective.kind csd: "auto", or what `cohobate subtokens build` wrote
    teacher_to_student: str | None = None  # the second file, if each direction was built as a file of its own
    projection: str | None = None  # for objective.kind xtoken: "auto", or what `cohobate projection build` wrote
    # student's special -> the teacher's that does the same, e.g. an end of turn
    special_roles: dict[str, str] = Field(default_factory=dict)

    def check(self, method: str, place: str) -> None:
        """Raise ValueError unless exactly what `method` needs is given."""
        wanted, other, command = (
            ("subtokens", "projection", "subtokens") if method == "csd" else ("projection", "subtokens", "projection")
        )
        if getattr(self, wanted) is None:
            given = f", got {other}, which is for another method" if getattr(self, other) is not None else ""
            raise ValueError(
                f"objective.kind {method} needs {place}.{wanted}{given}: write auto, or what `cohobate {command} "
                "build` wrote."
            )
        if getattr(self, other) is not None:
            raise ValueError(f"{place}.{other} is not read by objective.kind {method}. Leave it out.")
        if self.teacher_to_student is not None and (method != "csd" or self.subtokens == "auto"):
            raise ValueError(
                f"{place}.teacher_to_student is the second of two files of sub-token tables; give the first as "
                f"{place}.subtokens."
            )


class TeacherEntry(Reached):
    """One of `teachers`: a model in this process, or one that was or is asked elsewhere; with any tokenizer."""

    model: str
    path: str | None = None  # a store that `cohobate score` wrote: the model is not loaded
    # a vLLM server: the model is not loaded, only the tokenizer in its folder
    teacher_model_server_url: str | None = None
    served_model_name: str | None = None  # the model's name there, if the server has several
    tokenizer: str | None = None
    dtype: Dtype | None = None
    attn_implementation: str | None = None
    aligner: Aligner | None = None  # None: the student's tokenizer, which is proven, not believed
    weight: float = Field(default=1.0, ge=0)
    top_k: int | None = Field(default=None, ge=1)  # ids kept of each row; fewer than all is another loss
    max_length: int | None = Field(default=None, ge=2)  # tokens that this teacher reads of a row
    # with `route_by`: the values of that column that it answers for; None: all that no other teacher lists
    routes: list[StrictStr | StrictInt | StrictBool] | None = None

    def check(self, method: str, i: int) -> None:
        """Raise ValueError unless the entry, number `i`, has what `method` needs."""
        if method == "multi_teacher":
            self._check_plain(i)
        if self.aligner is not None:
            self.aligner.check(method, f"teachers[{i}].aligner")
        elif self.path is not None:
            raise ValueError(
                f"teachers[{i}] in a store needs an aligner: without one it is compared on whole rows, which a store "
                f"does not have. Write teachers.{i}.aligner.subtokens=auto, or give it as the one teacher of "
                "objective.kind=divergence (teacher.kind=stored)."
            )
        elif self.top_k is not None or self.max_length is not None:
            raise ValueError(
                f"teachers[{i}] without an aligner reads the student's own tokens, whole rows: leave top_k and "
                "max_length out, or name its aligner."
            )
        if self.path is not None and self.teacher_model_server_url is not None:
            raise ValueError(f"teachers[{i}] has a path and a teacher_model_server_url: a teacher is in one place.")
        if self.teacher_model_server_url is not None and (self.aligner is None or self.top_k is None):
            raise ValueError(f"teachers[{i}] on a server needs an aligner, and top_k: a server never says whole rows.")
        if self.teacher_model_server_url is None:
            self._check_not_reached(i)
        if self.path is not None and self.max_length is not None:
            raise ValueError(f"teachers[{i}].max_length: the store at its path has one of its own. Leave it out.")
        if method == "xtoken" and (self.path or self.teacher_model_server_url):
            raise ValueError(f"teachers[{i}]: X-Token reads whole rows, which neither a store nor a server has.")
        if method == "xtoken" and self.top_k is not None:
            raise ValueError(
                f"teachers[{i}].top_k: X-Token reads whole rows. Leave it out, or use objective.kind=csd."
            )

    def _check_not_reached(self, i: int) -> None:
        """Refuse what is read for a server only."""
        for name in ("served_model_name", *Reached.model_fields):
            if getattr(self, name) != TeacherEntry.model_fields[name].default:
                raise ValueError(
                    f"teachers[{i}].{name} is of a teacher on a server, and this one is not: add "
                    f"teachers.{i}.teacher_model_server_url, or leave it out."
                )

    def _check_plain(self, i: int) -> None:
        if self.aligner is not None:
            raise ValueError(
                f"teachers[{i}].aligner relates another tokenizer to the student's, but objective.kind multi_teacher "
                "compares token by token. Leave it out, or take objective.kind=csd, which has teachers of both kinds."
            )
        for name in ("path", "teacher_model_server_url", "top_k", "max_length"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"teachers[{i}].{name}: objective.kind multi_teacher compares whole distributions and whole rows, "
                    "so each teacher is a model beside the student. Leave it out."
                )
