# SPDX-License-Identifier: Apache-2.0
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cohobate.cli.recipe import load_recipe, shipped_recipes
from cohobate.cli.schema import (
    MOVED,
    SAMPLING_FIELDS,
    CommonSupport,
    Projected,
    as_in_recipe,
    config_section,
    section_keys,
)
from cohobate.errors import ConfigError
from cohobate.objectives import CommonSupportObjective, ProjectedObjective
from cohobate.trainer.card import PAPERS
from cohobate.trainer.config import DistillationConfig

GIVEN = ["student.model=small", "teacher.model=large", "data.train=rows.jsonl"]
OWN_TEACHER = ["student.model=small", "data.train=rows.jsonl"]
OTHER_TOKENIZER = ["student.model=small", "teachers.0.model=large", "data.train=rows.jsonl"]
NEEDS = {
    "gkd": GIVEN,
    "opd": GIVEN,
    "iw_opd": GIVEN,
    "opsd": OWN_TEACHER,
    "sdft": OWN_TEACHER,
    "sdpo": OWN_TEACHER,
    "opsd_smollm2": [],
    "csd": OTHER_TOKENIZER,
    "csd_multi_teacher": [*OTHER_TOKENIZER, "teachers.1.model=third"],
    "multi_teacher": [*OTHER_TOKENIZER, "teachers.1.model=third", "route_by=domain", "teachers.0.routes=[math]"],
    "xtoken": OTHER_TOKENIZER,
    "stored": [*OWN_TEACHER, "teacher.path=store"],
    "server": [*OWN_TEACHER, "teacher.teacher_model_server_url=http://localhost:8000"],
}
UNPUBLISHED = (
    "csd",
    "csd_multi_teacher",
    "multi_teacher",
    "stored",
    "server",
)  # of CSD we know no paper, the others are ways, not methods


def refusal(name: str, *changes: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(name, changes)
    return str(caught.value)


def test_every_shipped_recipe_is_listed_here():
    assert set(shipped_recipes()) == set(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_a_shipped_recipe_is_valid_and_says_what_it_is(name: str):
    recipe = load_recipe(name, NEEDS[name]).recipe
    assert recipe.output_dir == f"runs/{name}"
    assert shipped_recipes()[name].count(":") == 1, "the first line is `NAME: what it is`"


@pytest.mark.parametrize("name", [name for name in NEEDS if name not in UNPUBLISHED])
def test_a_shipped_recipe_names_the_paper_that_its_model_card_will_name(name: str):
    recipe = load_recipe(name, NEEDS[name])
    _, arxiv = PAPERS[recipe.recipe.method]
    source = (Path(__file__).parents[2] / "src/cohobate/recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    assert f"arXiv {arxiv}" in re.sub(r"\s*\n#\s*", " ", source)


def test_gkd_mixes_recorded_and_sampled_completions_by_halves():
    recipe = load_recipe("gkd", GIVEN).recipe
    assert recipe.sampling["on_policy_fraction"] == 0.5
    assert recipe.objective.kind == "divergence"
    assert recipe.objective.beta == 0.5


@pytest.mark.parametrize("name", [n for n in NEEDS if NEEDS[n]])
def test_what_a_recipe_leaves_open_is_named_with_the_words_to_add(name: str):
    message = refusal(name)
    for change in NEEDS[name]:
        assert change.split("=")[0] + "=..." in message


@pytest.mark.parametrize(
    ("change", "found", "offered"),
    [
        ("training.max_stpes=3", "training.max_stpes", "'max_steps'"),
        ("max_stpes=3", "max_stpes", "'training.max_steps'"),
        ("max_steps=3", "max_steps", "'training.max_steps'"),
        ("student.modle=x", "student.modle", "'model'"),
        ("student.lora.rnak=8", "student.lora.rnak", "'rank'"),
        ("objective.betta=1", "objective.betta", "'beta'"),
        ("data.prompts.overlong=skip", "data.prompts.overlong", "'over_long'"),
        ("data.privileged.sorce=x", "data.privileged.sorce", "'source'"),
        ("sampling.topp=0.9", "sampling.topp", "'top_p'"),
        ("eval.gradr=exact_match", "eval.gradr", "'grader'"),
        ("studnet.model=x", "studnet", "'student'"),
        ("training.beta=1", "training.beta", "Write objective.beta"),
        ("training.top_p=0.9", "training.top_p", "Write sampling.top_p"),
        ("lmbda=0.5", "lmbda", "Write sampling.on_policy_fraction"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(change: str, found: str, offered: str):
    message = refusal("gkd", *GIVEN, change)
    assert f"Unknown key {found}." in message
    assert offered in message


@pytest.mark.parametrize(
    "key", ["temperature", "sampling.temperature", "objective.temperature", "training.temperature"]
)
def test_a_bare_temperature_is_refused_with_both_names(key: str):
    message = refusal("gkd", *GIVEN, f"{key}=0.7")
    assert key in message
    assert "sampling_temperature" in message
    assert "distill_temperature" in message


def test_temperature_is_no_key_of_ours_inside_arguments_of_somebody_elses_template():
    recipe = load_recipe("gkd", [*GIVEN, "data.prompts.template_args={temperature: 1}"]).recipe
    assert recipe.data.prompts.template_args == {"temperature": 1}


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ("training.learning_rate=fast", "training.learning_rate must be a valid number, got 'fast'"),
        ("objective.beta=2", "objective.beta must be less than or equal to 1, got 2"),
        ("student=small", "student must be a section of keys, got 'small'"),
        ("teacher.kind=emma", "teacher.kind is 'emma'. Did you mean 'ema'?"),
        ("objective.kind=jsd", "Valid: divergence, policy_gradient, cross_entropy"),
        ("eval.grader=exact", "unknown grader 'exact'. Did you mean 'exact_match'?"),
        ("data.privileged.template=nothing", "data.privileged"),
        ("output_dir=${nowhere}", "nowhere"),
        ("training.max_steps=[1", "cannot read the changes"),
        ("max_steps", "key=value"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_wanted(change: str, wanted: str):
    changes = [*GIVEN, change]
    if "privileged" in change:
        changes.append("data.privileged.source=solution")
    assert wanted in refusal("gkd", *changes)


def test_an_option_of_another_kind_says_which_kind_takes_it():
    message = refusal("opsd", *OWN_TEACHER, "teacher.decay=0.9")
    assert "teacher.decay" in message
    assert "kind frozen takes kind" in message
    assert "goes with kind ema" in message


def test_a_new_kind_drops_what_the_recipe_set_for_the_old_one():
    for change in (["teacher.kind=ema", "teacher.decay=0.9"], ["teacher={kind: ema, decay: 0.9}"]):
        recipe = load_recipe("gkd", [*OWN_TEACHER, *change]).recipe
        assert recipe.teacher is not None
        assert recipe.teacher.model_dump() == {"kind": "ema", "decay": 0.9}


def test_all_problems_are_told_at_once():
    message = refusal("gkd", *GIVEN, "training.max_stpes=3", "objective.betta=1", "seed=x")
    assert all(word in message for word in ("max_stpes", "betta", "seed"))


def test_values_are_read_as_yaml():
    recipe = load_recipe("gkd", [*GIVEN, "training.learning_rate=3e-4", "training.bf16=true", "data.eval=null"]).recipe
    assert recipe.training["learning_rate"] == 3e-4
    assert recipe.training["bf16"] is True
    assert recipe.data.model_dump()["eval"] is None


def test_an_unknown_name_offers_the_nearest_recipe():
    assert "Did you mean 'gkd'?" in refusal("gdk")
    assert "no recipe file" in refusal("nowhere/gkd.yaml")


@pytest.mark.parametrize(
    "text",
    ["- a\n- b\n", "method: [\n", "method: !!python/object/apply:os.getcwd []\n", "", "method: a\nmethod: b\n"],
    ids=["a list", "not YAML", "a Python object", "empty", "a key twice"],
)
def test_a_file_that_is_no_recipe_is_one_paragraph(tmp_path: Path, text: str):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert "\n" not in refusal(str(path))


def test_a_recipe_of_ones_own_is_read_from_its_path_and_its_text_reads_back_equal(tmp_path: Path):
    first = load_recipe("opsd", [*OWN_TEACHER, "seed=7"])
    path = tmp_path / "mine.yaml"
    path.write_text(first.text)
    second = load_recipe(str(path))
    assert second.recipe == first.recipe
    assert second.plain() == first.plain()


def test_what_is_written_down_has_interpolations_unfilled(monkeypatch: pytest.MonkeyPatch):
    """An environment variable may be a secret; a model card is public."""
    monkeypatch.setenv("SECRET_NAME", "hunter2")
    loaded = load_recipe("gkd", [*GIVEN, "output_dir=runs/${oc.env:SECRET_NAME}"])
    assert loaded.recipe.output_dir == "runs/hunter2"
    assert "hunter2" not in loaded.text
    assert "hunter2" not in str(loaded.plain())


def test_every_field_of_the_trainers_config_has_exactly_one_home():
    fields = set(DistillationConfig.__dataclass_fields__)
    sampling, training = (set(config_section(part).model_fields) for part in ("sampling", "training"))
    assert not sampling & training
    assert sampling == set(SAMPLING_FIELDS)
    assert set(MOVED) <= fields
    assert not training & set(MOVED)
    keys = {(place[0] if place else "", name) for place, names in section_keys().items() for name in names}
    for target in MOVED.values():
        if target and not target.startswith("--"):
            section, _, rest = target.rpartition(".")
            assert (section.partition(".")[0], rest) in keys


def test_sections_are_frozen():
    recipe = load_recipe("gkd", GIVEN).recipe
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 3


# ------------------------------------------------------------------ several teachers


def test_an_entry_of_a_list_is_changed_by_its_number_and_the_next_one_is_added():
    changes = [*OTHER_TOKENIZER, "teachers.0.top_k=7", "teachers[1].model=third", "teachers.1.weight=0.25"]
    teachers = load_recipe("csd", changes).recipe.teachers
    assert [(t.model, t.top_k, t.weight) for t in teachers] == [("large", 7, 1.0), ("third", None, 0.25)]
    assert teachers[0].aligner is not None
    assert teachers[0].aligner.subtokens == "auto"
    assert "names entry 3 of a list of 1: the next one is 1" in refusal("csd", *OTHER_TOKENIZER, "teachers.3.model=x")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (["teachers.0.modle=x"], "Unknown key teachers.0.modle. Did you mean 'model'?"),
        (["teachers.0.aligner.subtoken=auto"], "Unknown key teachers.0.aligner.subtoken. Did you mean 'subtokens'?"),
        (["objective.subtokens=tables/"], "Did you mean 'teachers.0.aligner.subtokens'?"),
        (["teachers.0.aligner.subtokens=null"], "objective.kind csd needs teachers[0].aligner.subtokens: write auto"),
        (
            ["teachers.0.aligner={projection: auto}", "teachers.0.aligner.subtokens=null"],
            "needs teachers[0].aligner.subtokens, got projection, which is for another method",
        ),
        (["teachers.0.aligner.projection=auto"], "teachers[0].aligner.projection is not read by objective.kind csd"),
        (
            ["teachers.0.aligner.teacher_to_student=b.safetensors"],
            "teachers[0].aligner.teacher_to_student is the second of two files",
        ),
        (["teachers.0.path=a", "teachers.0.aligner=null"], "teachers[0] in a store needs an aligner"),
        (["teachers.0.path=a", "teachers.0.teacher_model_server_url=b"], "teachers[0] has a path and a teacher_model"),
        (
            ["teachers.0.teacher_model_server_url=b", "teachers.0.top_k=null"],
            "teachers[0] on a server needs an aligner",
        ),
        (["teachers.0.aligner=null"], "teachers[0] without an aligner reads the student's own tokens"),
        (["teacher={kind: frozen}"], "this recipe has `teachers`, a list: write teachers.0.model=DIR"),
        (["teachers=[]"], "objective.kind csd reads `teachers`, a list with an entry for each"),
        (
            ["objective={kind: divergence}"],
            "`teachers` goes with objective.kind csd, xtoken or multi_teacher, not with",
        ),
        (["objective={kind: xtoken}"], "objective.kind xtoken needs teachers[0].aligner.projection, got subtokens"),
    ],
)
def test_what_does_not_belong_to_a_list_of_teachers_is_named_with_its_place(changes: list[str], part: str):
    assert part in refusal("csd", *OTHER_TOKENIZER, *changes)


def test_what_becomes_of_the_ids_that_a_server_does_not_name_is_said_in_one_place():
    message = refusal("server", *NEEDS["server"], "objective.tail=renormalize")
    assert "teacher.loss_add_tail" in message


def test_x_token_reads_whole_rows():
    assert "teachers[0].top_k: X-Token reads whole rows" in refusal("xtoken", *OTHER_TOKENIZER, "teachers.0.top_k=8")


@pytest.mark.parametrize(
    ("section", "part"), [(CommonSupport, CommonSupportObjective), (Projected, ProjectedObjective)]
)
def test_the_defaults_of_an_objective_over_teachers_are_its_own(section: Any, part: Any):
    own = {
        f.name: f.default for f in dataclasses.fields(part) if f.repr and f.name not in ("weights", "modes", "routed")
    }
    own["distill_temperature"] = own.pop("temperature")
    assert {name: field.default for name, field in section.model_fields.items() if name != "kind"} == own


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (
            "packing fills micro-batches up to token_budget, the tokens of one pass: set it too.",
            "training.packing fills micro-batches up to training.token_budget, the tokens of one pass: set it too.",
        ),
        ("top_k must be >= 0, got -1.", "sampling.top_k must be >= 0, got -1."),
        ("beta must be in [0, 1], got 2.", "objective.beta must be in [0, 1], got 2."),
        ("num_iterations=2 needs max_steps.", "sampling.num_iterations=2 needs training.max_steps."),
        ("set sampling.num_iterations, or top_k=3.", "set sampling.num_iterations, or top_k=3."),
        ("row 'max_steps', per-max_steps: turn packing off.", "row 'max_steps', per-max_steps: turn packing off."),
        ("hub_token must be secret, no_such_field too.", "hub_token must be secret, no_such_field too."),
        ("", ""),
    ],
)
def test_a_message_about_a_setting_of_the_trainer_names_its_place_in_a_recipe(message: str, wanted: str):
    assert as_in_recipe(message) == wanted
    assert as_in_recipe(wanted) == wanted
