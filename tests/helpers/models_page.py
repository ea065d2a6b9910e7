"""The tables of ``docs/reference/models.md``, generated from the list of architectures and the tests that run
over it.

``make docs`` writes them into the page; a test checks that they are current.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.generated_tables import markdown_table, with_tables
from runtime.layers.chain import normalises_over_rows
from runtime.layers.experts import ExpertBalance
from tests.e2e import test_e2e_models as processes
from tests.helpers.architectures import ARCHITECTURES, Architecture
from tests.runtime import test_architectures as matrix
from tests.runtime import test_hugging_face_trainer as trainer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
LOSSES = {
    "causal": "next tokens",
    "masked": "masked tokens",
    "images": "classes",
    "translation": "tokens of the decoder",
}
"""Elements over which the model's own loss is a mean, by task."""
CHECKS: dict[str, Callable[..., None]] = {
    "real processes: SIGKILL of a node or a trainer, then a join": (
        processes.test_a_model_is_trained_through_a_kill_and_a_join
    ),
    "losses of Hugging Face's `Trainer` with gradient accumulation": trainer.test_losses_are_those_of_the_trainer,
    "rows of a microbatch split among the devices of a stage": matrix.test_stages_on_several_devices,
    "microbatches of different lengths, padded": matrix.test_microbatches_of_different_lengths,
    "samples and whole microbatches without labels": matrix.test_samples_without_labels,
    "dropout: the same in every layout": matrix.test_dropout_does_not_depend_on_the_layout,
    "sharded optimizer state (`zero1`)": matrix.test_sharded_optimizer_state,
    "tensor parallelism among the devices of a stage, by Hugging Face's plan": matrix.test_tensor_parallel_stages,
    "LoRA adapters of peft": matrix.test_adapters_alone_are_trained,
    "bfloat16, float16, float32": matrix.test_lower_precisions,
}
"""Tests that run over some architectures, by what they check."""


def tables() -> dict[str, str]:
    """Return the tables by the names that the page gives them."""
    rows = [_row(name, entry) for name, entry in ARCHITECTURES.items()]
    head = ("architecture", "class", "the loss is a mean over", "equal to", "peculiarities")
    checks = [(check, ", ".join(f"`{name}`" for name in _run_over(test))) for check, test in CHECKS.items()]
    return {
        "architectures": markdown_table(head, rows),
        "checks": markdown_table(("checked with them", "architectures"), checks),
    }


def _row(name: str, entry: Architecture) -> tuple[str, ...]:
    model = entry.make()
    loss = LOSSES[entry.task] if entry.own_loss else f"{LOSSES[entry.task]}, given as `loss=`"
    library = type(model).__module__.startswith("transformers.")
    shown = f"`{type(model).__name__}`" if library else "your own, a residual network"
    return f"`{name}`", shown, loss, f"{entry.relative:.0e}".replace("e-0", "e-"), _peculiar(model, entry)


def _peculiar(model: nn.Module, entry: Architecture) -> str:
    config = getattr(model, "config", None)
    named = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    found = {
        "tied embeddings": len(set(named)) < len(named),
        "sliding windows": any(getattr(config, key, None) for key in ("sliding_window", "local_attention")),
        "an auxiliary loss balances the experts, so rows stay together": ExpertBalance.find(model)
        is not None,
        "batch normalisation, so rows stay together": normalises_over_rows(model),
        "encoder and decoder are one chain of blocks": getattr(config, "is_encoder_decoder", False),
        entry.note: bool(entry.note),
    }
    return "; ".join(text for text, holds in found.items() if holds) or "–"


def _run_over(test: Callable[..., None]) -> Iterator[str]:
    """Yield the architectures over which a test is parametrised, in the list's order."""
    taken = set()
    marks: list[Any] = getattr(test, "pytestmark", [])
    for mark in marks:
        if mark.name != "parametrize":
            continue
        names, values = mark.args[0], list(mark.args[1])
        if names == "architecture":
            taken |= set(values)
        elif "architecture" in names:
            taken |= {value[list(names).index("architecture")] for value in values}
    yield from (name for name in ARCHITECTURES if name in taken)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), tables()), encoding="utf-8")
