# SPDX-License-Identifier: Apache-2.0
"""Uses the installed wheel as a stranger would, outside the source tree: names, command, recipes, training.

Run with the wheel's folder first on PYTHONPATH; it refuses to test the source tree by mistake.
"""

import os
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import cohobate

SITE = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).resolve()


def check(what: str, ok: bool, detail: str = "") -> None:
    print(f"  {'ok  ' if ok else 'FAIL'} {what}", flush=True)
    if not ok:
        sys.exit(f"smoke test: {what}. {detail}")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The console script of the wheel."""
    return subprocess.run(
        [sys.executable, str(SITE / "bin" / "cohobate"), *arguments], capture_output=True, text=True, timeout=300
    )


def three_steps(folder: Path) -> list[float]:
    """A two-layer student distilled from itself through the public names; returns the logged losses."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    characters = {c: i for i, c in enumerate(["<pad>", "<eos>", *"0123456789+="])}
    raw = Tokenizer(models.WordLevel(characters, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")

    def model(seed: int) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(characters),
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                eos_token_id=1,
                pad_token_id=0,
            )
        )

    trainer = cohobate.DistillationTrainer(
        model=model(0),
        teacher=model(1),
        args=cohobate.DistillationConfig(
            output_dir=str(folder / "run"),
            max_steps=3,
            per_device_train_batch_size=2,
            max_completion_length=6,
            logging_steps=1,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=[{"prompt": f"{a}+{b}="} for a in range(3) for b in range(3)],
        processing_class=tokenizer,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    package = Path(cohobate.__file__).resolve().parent
    check("the wheel is under test, not the source tree", package == SITE / "cohobate", str(package))
    for name in cohobate.__all__:
        getattr(cohobate, name)
    check(f"{len(cohobate.__all__)} public names load", True)
    recipes = sorted(p.name for p in files("cohobate").joinpath("recipes").iterdir() if p.name.endswith(".yaml"))
    check(f"recipes are in the wheel: {' '.join(recipes)}", {"gkd.yaml", "opsd.yaml"} <= set(recipes))
    weights = sorted(p.name for p in (package / "demo" / "assets").rglob("*.safetensors"))
    check(f"the demo's weights are in the wheel: {' '.join(weights)}", len(weights) >= 2)

    for arguments in (["--help"], ["train", "--help"], ["eval", "--help"], ["demo", "--help"]):
        done = command(*arguments)
        check(f"cohobate {' '.join(arguments)}", done.returncode == 0, done.stderr)
    done = command("train", "gkd", "training.max_stpes=3")
    check("a misspelt key exits with 2 and offers the name", done.returncode == 2 and "max_steps" in done.stderr)

    with tempfile.TemporaryDirectory() as folder:
        losses = three_steps(Path(folder))
        check(f"three training steps: losses {losses}", len(losses) == 3 and all(0 < x < 10 for x in losses))
        done = command("demo", "--quick", "-o", f"{folder}/demo")
        plots = sorted(p.name for p in Path(folder, "demo").glob("*.png"))
        check(f"cohobate demo --quick draws {' '.join(plots)}", done.returncode == 0 and bool(plots), done.stderr)


if __name__ == "__main__":
    main()
