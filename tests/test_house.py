# SPDX-License-Identifier: Apache-2.0
"""Rules of the house that a machine can check: licence headers, nothing that executes data, no path of one machine,
the public names, and a README whose commands are the ones that CI runs."""

import ast
import contextlib
import inspect
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import cohobate

ROOT = Path(__file__).resolve().parents[1]
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".sh", ".json", ".cfg", ".ini", ""}


def repository_files() -> list[Path]:
    """Files that git tracks or would track; without git, all but environments and build outputs."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        found = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        skipped = re.compile(r"^(\..*cache|\.venv.*|\.git|build|dist|runs|.*\.egg-info|__pycache__)$")
        found = [p for p in ROOT.rglob("*") if not any(skipped.match(part) for part in p.relative_to(ROOT).parts)]
    return sorted(p for p in found if p.is_file())


FILES = repository_files()
PYTHON_FILES = [p for p in FILES if p.suffix == ".py"]
SOURCE_FILES = [p for p in PYTHON_FILES if p.is_relative_to(ROOT / "src")]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_python_file_begins_with_the_licence_header():
    assert PYTHON_FILES
    missing = [
        relative(p)
        for p in PYTHON_FILES
        if not p.read_text(encoding="utf-8").startswith("# SPDX-License-Identifier: Apache-2.0\n")
    ]
    assert not missing


# ------------------------------------------------------------------ nothing that executes data

FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
FORBIDDEN_BUILTINS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_CALLS = {
    "torch.load",
    "torch.save",  # writes pickles
    "torch.hub.load",
    "torch.jit.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "pandas.read_pickle",
    "os.system",
}
FORBIDDEN_TRUE_ARGUMENTS = {"allow_pickle", "trust_remote_code", "shell"}
FORBIDDEN_FALSE_ARGUMENTS = {"weights_only"}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain, or the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Local name -> full dotted name, so that `from torch import load` and `import numpy as np` are seen through."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dangers(source: str) -> list[str]:
    """What in `source` could run code that came as data, one text each."""
    tree = ast.parse(source)
    names = imported_names(tree)
    found = []
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            modules = []
        found += [f"{line}: import {m}" for m in modules if m.split(".")[0] in FORBIDDEN_MODULES]
        if not isinstance(node, ast.Call):
            continue
        written = dotted(node.func)
        head, _, rest = written.partition(".")
        called = names.get(head, head) + (f".{rest}" if rest else "")
        if written in FORBIDDEN_BUILTINS or called in FORBIDDEN_CALLS:
            found.append(f"{line}: {called}()")
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if (keyword.arg in FORBIDDEN_TRUE_ARGUMENTS and value is True) or (
                keyword.arg in FORBIDDEN_FALSE_ARGUMENTS and value is False
            ):
                found.append(f"{line}: {keyword.arg}={value}")
    return found


def test_the_source_never_executes_data():
    assert SOURCE_FILES
    found = [f"{relative(p)}:{d}" for p in SOURCE_FILES for d in dangers(p.read_text(encoding="utf-8"))]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "import dill.source as d",
        "import torch\ntorch.load('x')",
        "from torch import load as read\nread('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import yaml\nyaml.load(text)",
        "eval('1')",
        "exec(code)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "read('x', weights_only=False)",
    ],
)
def test_the_check_for_executed_data_sees(source: str):
    assert dangers(source)


@pytest.mark.parametrize(
    "source",
    ["model.eval()", "import re\nre.compile('x')", "import json\njson.load(f)", "import yaml\nyaml.safe_load(text)"],
)
def test_the_check_for_executed_data_lets_pass(source: str):
    assert not dangers(source)


# ------------------------------------------------------------------ nothing that is true on one machine only

# Spelt in pieces, so that this file does not find itself.
MACHINE_PATH = re.compile(
    r"(?<![\w.~}])/(?:" + "|".join(["home", "Users", "root", "work", "mnt", "opt", "farm"]) + r")/"
)
PACKAGE_HOSTS = re.compile(
    "|".join([r"py" + r"pi\.org", r"python" + r"hosted", r"download\.py" + r"torch", r"npm" + r"js\.(?:org|com)"])
)


def test_no_file_names_a_path_or_a_package_host_of_one_machine():
    found = []
    for path in FILES:
        if path.suffix not in TEXT_SUFFIXES or path.name == "LICENSE":
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_PATH.search(line) or PACKAGE_HOSTS.search(line):
                found.append(f"{relative(path)}:{number}: {line.strip()[:100]}")
    assert not found


def normalised(package: str) -> str:
    """A package's name as an index compares it."""
    return re.sub(r"[-_.]+", "-", package.lower())


def test_every_installed_version_is_pinned_and_torch_above_all():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.]+", line) for line in lines)
    pinned = {normalised(name): version for name, version in (line.split("==") for line in lines)}
    assert pinned["torch"] == "2.13.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra, packages in project["optional-dependencies"].items():
        wanted += [] if extra == "peers" else packages
    names = {normalised(re.split(r"[\[<>=! ]", w, maxsplit=1)[0]) for w in wanted} - {"cohobate"}
    assert not names - set(pinned)


# ------------------------------------------------------------------ the public names

PUBLIC = [
    "DistillationConfig",
    "DistillationTrainer",
    "JSDLossOutput",
    "OPSDTrainingBatch",
    "ResponseTokenBatch",
    "RolloutBatch",
    "RolloutRequest",
    "SamplingConfig",
    "TeacherContext",
    "VocabParallelLMHead",
    "align_rollout_logits",
    "build_opsd_training_batch",
    "common_support_divergence",
    "common_support_loss_sum",
    "forward_kl",
    "fused_linear_divergence",
    "fused_linear_logprobs",
    "fused_linear_token_loss",
    "fused_linear_topk",
    "generalized_jsd_loss",
    "iw_opd_weights",
    "jsd",
    "projected_kl",
    "reverse_kl",
    "sampled_kl_loss",
    "shard_lm_head",
    "top_k_scores",
    "topk_divergence",
    "vocab_parallel_argmax",
    "vocab_parallel_common_support",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_entropy",
    "vocab_parallel_fused_divergence",
    "vocab_parallel_jsd",
    "vocab_parallel_kl_div",
    "vocab_parallel_logprobs",
    "vocab_parallel_projected_kl",
    "vocab_parallel_sample",
    "vocab_parallel_topk",
]
"""Relied on from outside. Adding a name is a line here; removing or renaming one is a breaking change."""

SIGNATURES = {
    "align_rollout_logits": (
        "student_logits teacher_logits student_prompt_lengths teacher_prompt_lengths response_lengths",
        "",
    ),
    "build_opsd_training_batch": ("", "rollout teacher_context pad_token_id"),
    "forward_kl": ("student_logprobs teacher_logprobs", ""),
    "reverse_kl": ("student_logprobs teacher_logprobs", ""),
    "jsd": ("student_logprobs teacher_logprobs beta", ""),
    "generalized_jsd_loss": (
        "student_logits teacher_logits response_mask beta temperature teacher_top_k pointwise_clip",
        "",
    ),
    "fused_linear_divergence": (
        "student_hidden student_weight teacher_hidden teacher_weight",
        "beta temperature weights student_bias teacher_bias student_scale teacher_scale "
        "student_softcap teacher_softcap",
    ),
    "fused_linear_topk": (
        "hidden weight teacher_ids teacher_logprobs",
        "beta tail temperature weights bias scale softcap",
    ),
    "fused_linear_logprobs": ("hidden weight target_ids", "temperature bias scale softcap"),
    "fused_linear_token_loss": ("hidden weight target_ids token_loss", "temperature bias scale softcap"),
    "vocab_parallel_logprobs": (
        "logits index tp_group vocab_start_index vocab_end_index global_vocab_size ignore_index",
        "",
    ),
    "vocab_parallel_cross_entropy": (
        "logits target tp_group vocab_start_index vocab_end_index global_vocab_size ignore_index",
        "",
    ),
    "vocab_parallel_entropy": ("logits tp_group", ""),
    "vocab_parallel_kl_div": ("student teacher tp_group reverse", ""),
    "vocab_parallel_jsd": ("student teacher tp_group", "beta"),
    "vocab_parallel_topk": ("logits k", "tp_group vocab_start_index vocab_end_index"),
    "vocab_parallel_argmax": ("logits", "tp_group vocab_start_index vocab_end_index"),
    "vocab_parallel_sample": (
        "logits",
        "tp_group vocab_start_index vocab_end_index temperature top_k top_p generator",
    ),
    "common_support_divergence": (
        "student_logits student_ids teacher_scores teacher_ids chunks tables",
        "temperature beta realized_only_mismatch keep_realized min_support forced_mode rows",
    ),
    "common_support_loss_sum": ("output", "mismatch_weight"),
    "projected_kl": (
        "student_logits student_ids teacher_logits teacher_ids chunks projection",
        "temperature vocab_top_k reverse exact_only mode uncommon_top_k drop_unreachable columns rows",
    ),
    "top_k_scores": ("teacher_logits teacher_ids k", "temperature rows"),
    "vocab_parallel_common_support": (
        "student_logits student_ids teacher_scores teacher_ids chunks tables",
        "tp_group vocab_start_index cp_group positions evaluation rows",
    ),
    "vocab_parallel_projected_kl": (
        "student_logits student_ids teacher_logits teacher_ids chunks projection",
        "tp_group vocab_start_index cp_group positions evaluation rows",
    ),
    "topk_divergence": ("student_logits teacher_ids teacher_logprobs", "beta tail temperature"),
    "sampled_kl_loss": ("student_logprobs teacher_logprobs", "estimator"),
    "iw_opd_weights": ("advantages mask", "gamma"),
    "DistillationTrainer": (
        "model teacher args train_dataset eval_dataset processing_class objective rollouts callbacks peft_config",
        "",
    ),
}
"""Positional names in order, then keyword names that must exist; more keywords may follow."""


def test_the_public_names_are_frozen():
    assert sorted(cohobate.__all__) == PUBLIC
    assert set(cohobate._HOME) == set(PUBLIC)
    assert set(PUBLIC) <= set(dir(cohobate))


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_loads_from_the_place_that_the_type_checker_is_told(name: str):
    value = getattr(cohobate, name)
    assert value is getattr(import_module(f"cohobate.{cohobate._HOME[name]}"), name)
    tree = ast.parse(Path(cohobate.__file__).read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert typed[name] == f"cohobate.{cohobate._HOME[name]}"
    assert (value.__doc__ or "").strip(), f"{name} has no docstring"


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_public_signature_is_frozen(name: str):
    positional, keywords = (text.split() for text in SIGNATURES[name])
    parameters = inspect.signature(getattr(cohobate, name)).parameters
    by_position = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_position[: len(positional)] == positional
    missing = set(keywords) - set(parameters)
    assert not missing


def test_the_mathematical_core_is_type_checked_while_the_suite_runs():
    with pytest.warns(UserWarning, match="violates type hint"), contextlib.suppress(Exception):
        cohobate.forward_kl("not a tensor", "not a tensor")  # pyright: ignore[reportArgumentType]


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'forward_lk'"):
        _ = cohobate.forward_lk  # pyright: ignore[reportAttributeAccessIssue]


def test_importing_cohobate_starts_nothing():
    """No heavy import, thread, logging handler or file: the cost is paid when a name is first used."""
    code = """
import logging, sys, threading
before = set(sys.modules)
import cohobate
heavy = {"torch", "transformers", "numpy", "datasets", "accelerate", "peft", "matplotlib", "rich", "typer"}
new = {name.split(".")[0] for name in set(sys.modules) - before}
assert not heavy & new, heavy & new
assert threading.active_count() == 1
assert not logging.getLogger().handlers and not logging.getLogger("cohobate").handlers
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------ one version, one set of commands


def test_the_version_is_the_same_in_code_package_and_changelog():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert cohobate.__version__ == project["version"]
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_ci_runs_the_test_command_that_the_readme_gives():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"^make demo\b", readme, re.MULTILINE)
    assert re.search(r"^make test\b", readme, re.MULTILINE)
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "README.md" in ci, "CI takes the command from the README, so that the two cannot differ"


def test_every_make_target_that_a_page_names_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    pages = [p for p in FILES if p.suffix == ".md"]
    named = {
        (relative(p), name)
        for p in pages
        for name in re.findall(r"(?:^|`)make ([a-z-]+)", p.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert not {(page, name) for page, name in named if name not in targets}
