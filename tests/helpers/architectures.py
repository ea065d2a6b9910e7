"""Small models of many architectures, with samples that make losses hard: padding, and unequal numbers of
labels.

``build`` is a training function for them that knows nothing about windows or layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from runtime.training import Training

VOCABULARY = 64
LENGTH = 10
SAMPLES = 64
IGNORED = -100
CLASSES = 3
PIXELS = 32

_WIDTHS = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}
_SMALL = _WIDTHS | {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
_ROUNDING = 1e-8
"""Tolerance for expert balancing, whose shares of tokens Hugging Face computes in float32."""
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model that is trained in the tests."""

    make: Callable[..., nn.Module]
    """Function that creates the model, with options in place of those below."""
    task: str
    """Task of its samples."""
    split: tuple[str, ...] | None = None
    own_loss: bool = True
    relative: float = 1e-9
    """Largest difference from the plain loop's losses."""
    note: str = ""
    """Remark on its blocks for readers of ``docs/reference/models.md``."""


def _hugging_face(auto: Any, kind: str, **options: Any) -> Callable[..., nn.Module]:
    def make(**others: Any) -> nn.Module:
        transformers.logging.set_verbosity_error()
        model: nn.Module = auto.from_config(AutoConfig.for_model(kind, **(options | others)))
        return model

    return make


def _causal(kind: str, *, relative: float = 1e-9, note: str = "", **options: Any) -> Architecture:
    made = _hugging_face(AutoModelForCausalLM, kind, **options)
    return Architecture(make=made, task="causal", relative=relative, note=note)


def take_out_casts(replace: Callable[[Any, str, Any], None]) -> None:
    """Remove the casts to float32 that models make in norms, softmax, routers and losses.

    With these casts a float64 model rounds to float32 in the middle, so two orders of the same sums
    sometimes differ by a last bit of float32.

    :param replace: sets an attribute, as ``setattr`` does.
    """
    plain = {name: getattr(Tensor, name) for name in ("float", "to", "type")}
    softmax = functional.softmax

    def kept(name: str) -> Any:
        def cast(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
            down = name == "float" or torch.float32 in (*arguments, *named.values())
            if tensor.dtype is torch.float64 and down:
                return tensor
            return plain[name](tensor, *arguments, **named)

        return cast

    def whole(tensor: Tensor, dim: int | None = None, *, dtype: Any = None, **named: Any) -> Tensor:
        return softmax(tensor, dim, dtype=None if tensor.dtype is torch.float64 else dtype, **named)

    for name in plain:
        replace(Tensor, name, kept(name))
    replace(functional, "softmax", whole)


class Residual(nn.Module):
    """Two convolutions with a shortcut around them."""

    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.normal = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.shortcut = nn.AvgPool2d(stride)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shortcut(x) + self.second(self.normal(self.first(x)).relu())
        return out


class HandWritten(nn.Module):
    """A residual network written by hand: its blocks are not in a list."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.normal = nn.BatchNorm2d(width)
        self.early = Residual(width)
        self.middle = Residual(width, stride=2)
        self.late = nn.Sequential(nn.Conv2d(width, 2 * width, 1), Residual(2 * width))
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.early(self.normal(self.stem(pixel_values)).relu())
        x = self.late(self.middle(x).tanh())
        logits: Tensor = self.head(x.relu().mean((2, 3)))
        return logits


ARCHITECTURES: dict[str, Architecture] = {
    "llama": _causal("llama", **_SMALL),
    "qwen3": _causal("qwen3", **_SMALL, head_dim=4, tie_word_embeddings=True),
    "mistral": _causal("mistral", **_SMALL, sliding_window=4),
    "gemma3": _causal("gemma3_text", **_SMALL, head_dim=4, sliding_window=4),
    "phi3": _causal("phi3", **_SMALL, pad_token_id=0),
    "gpt2": _causal(
        "gpt2",
        n_embd=16,
        n_layer=3,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "gpt_neox": _causal("gpt_neox", **_SMALL),
    "opt": _causal(
        "opt",
        hidden_size=16,
        ffn_dim=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        dropout=0.0,
        word_embed_proj_dim=16,
    ),
    "bloom": _causal(
        "bloom",
        hidden_size=16,
        n_layer=3,
        n_head=4,
        vocab_size=VOCABULARY,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
    "olmo2": _causal("olmo2", **_SMALL),
    "deepseek_v3": _causal(
        "deepseek_v3",
        note="the first block is dense, the others have experts",
        **_SMALL | {"num_key_value_heads": 4},
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        moe_intermediate_size=16,
        n_shared_experts=1,
        experts_implementation="eager",
    ),
    "mixtral": _causal(
        "mixtral",
        relative=_ROUNDING,
        **_SMALL,
        **_EXPERTS,
        num_local_experts=4,
        experts_implementation="eager",
    ),
    "qwen3_moe": _causal(
        "qwen3_moe",
        relative=_ROUNDING,
        **_SMALL,
        **_EXPERTS,
        num_experts=4,
        moe_intermediate_size=16,
        head_dim=4,
        decoder_sparse_step=1,
        experts_implementation="eager",
    ),
    "mamba2": _causal(
        "mamba2",
        note="state spaces instead of attention",
        hidden_size=16,
        num_hidden_layers=3,
        vocab_size=VOCABULARY,
        num_heads=4,
        head_dim=8,
        state_size=4,
        n_groups=1,
        chunk_size=8,
    ),
    "bert": Architecture(
        make=_hugging_face(AutoModelForMaskedLM, "bert", **_SMALL, **_NO_DROPOUT), task="masked"
    ),
    "modernbert": Architecture(
        make=_hugging_face(
            AutoModelForMaskedLM, "modernbert", **_SMALL, **_SPECIAL, cls_token_id=1, sep_token_id=2
        ),
        task="masked",
    ),
    "deberta-v2": Architecture(
        make=_hugging_face(
            AutoModelForMaskedLM,
            "deberta-v2",
            **_SMALL,
            **_NO_DROPOUT,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
        ),
        task="masked",
        note="every stage has the table of relative positions",
    ),
    "vit": Architecture(
        make=_hugging_face(
            AutoModelForImageClassification,
            "vit",
            **_SMALL,
            **_NO_DROPOUT,
            image_size=PIXELS,
            patch_size=8,
            num_labels=CLASSES,
        ),
        task="images",
    ),
    "resnet": Architecture(
        make=_hugging_face(
            AutoModelForImageClassification,
            "resnet",
            embedding_size=4,
            hidden_sizes=[4, 8, 12],
            depths=[1, 1, 1],
            layer_type="basic",
            num_labels=CLASSES,
        ),
        task="images",
    ),
    "nn.Module": Architecture(
        make=HandWritten,
        task="images",
        split=("early", "middle", "late"),
        own_loss=False,
        note="its blocks are no list and are named in `split=`",
    ),
    "t5": Architecture(
        make=_hugging_face(
            AutoModelForSeq2SeqLM,
            "t5",
            d_model=16,
            d_kv=4,
            d_ff=32,
            num_layers=2,
            num_heads=4,
            vocab_size=VOCABULARY,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        task="translation",
    ),
    "bart": Architecture(
        make=_hugging_face(
            AutoModelForSeq2SeqLM,
            "bart",
            **_SPECIAL,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            vocab_size=VOCABULARY,
            max_position_embeddings=32,
            dropout=0.0,
            decoder_start_token_id=2,
            forced_eos_token_id=2,
        ),
        task="translation",
    ),
}


@dataclass(slots=True)
class Samples:
    """Samples of a task, each a function of its index."""

    task: str
    length: int = LENGTH
    variable: bool = False
    """Whether samples keep their own lengths and the collate function pads them."""
    count: int = SAMPLES
    unlabelled: frozenset[int] = frozenset()
    _made: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index not in self._made:
            sample = self._make(torch.Generator().manual_seed(index))
            if index in self.unlabelled:
                sample["labels"] = torch.full_like(sample["labels"], IGNORED)
            self._made[index] = sample
        return self._made[index]

    def _make(self, generator: torch.Generator) -> dict[str, Tensor]:
        def number(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=generator))

        if self.task == "images":
            pixels = torch.randn(3, PIXELS, PIXELS, generator=generator)
            return {"pixel_values": pixels, "labels": torch.tensor(number(0, CLASSES))}
        ids = torch.randint(3, VOCABULARY, (self.length,), generator=generator)
        own = number(self.length // 2, self.length + 1)
        mask = (torch.arange(self.length) < own).long()
        labels = ids.masked_fill(mask == 0, IGNORED)
        if self.task == "causal":
            labels[: number(0, 4)] = IGNORED  # The prompt.
        elif self.task == "masked":
            chosen = torch.rand(self.length, generator=generator) < 0.3
            chosen[number(0, own)] = True
            labels = labels.masked_fill(~chosen, IGNORED)
            ids = ids.masked_fill(chosen, 3)
        else:
            labels = labels.flip(0)[number(0, 3) :][: self.length - 3].sort(descending=True).values
        sample = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}
        if not self.variable:
            return sample
        return {
            key: value[: own if key != "labels" or self.task != "translation" else None]
            for key, value in sample.items()
        }


_PADDING = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}


def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad each entry to the longest of the microbatch."""
    return {
        key: nn.utils.rnn.pad_sequence(
            [s[key] for s in samples], batch_first=True, padding_value=_PADDING[key]
        )
        for key in samples[0]
    }


def accuracy(output: Any, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the share of labels that have the highest score."""
    counted = batch["labels"] != IGNORED
    logits = output if isinstance(output, Tensor) else output.logits
    right = (logits.argmax(-1) == batch["labels"]) & counted
    return {"accuracy": (right.sum(), counted.sum())}


def class_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output, batch["labels"])


class Pairs(Samples):
    """(input, target) of a task, for a list of layers."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        sample = super().__getitem__(index)
        return sample["input_ids"], sample["labels"]


def token_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over labels that count, and their number."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), (
        target != IGNORED
    ).sum()


def build_layers(unlabelled: Sequence[int] = ()) -> Training:
    """Return a training of a list of layers whose rows have unequal numbers of labels."""
    width = 16
    return Training(
        layers=[
            nn.Embedding(VOCABULARY, width),
            *(nn.TransformerEncoderLayer(width, 4, 32, dropout=0.0, batch_first=True) for _ in range(3)),
            nn.Linear(width, VOCABULARY),
        ],
        loss=token_loss,
        dataset=Pairs("masked", unlabelled=frozenset(unlabelled)),
        optimizer=lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=3e-3),
    )


def lora(model: nn.Module, rank: int = 4) -> nn.Module:
    """Return the model with adapters in its linear layers and everything else frozen."""
    import peft  # This is imported here because half a second of it would slow down the start of each trainer.

    adapted: nn.Module = peft.get_peft_model(
        model, peft.LoraConfig(r=rank, target_modules="all-linear", lora_dropout=0.0, init_lora_weights=False)
    )
    return adapted


def build(
    architecture: str,
    options: dict[str, Any] | None = None,
    variable: bool = False,
    adapters: bool = False,
    unlabelled: Sequence[int] = (),
    learning_rate: float = 3e-3,
) -> Training:
    """Return the training of an architecture of the table.

    :param variable: samples have different lengths and are padded to the longest of a microbatch.
    :param adapters: train only LoRA adapters.
    :param unlabelled: samples all of whose labels are -100.
    """
    entry = ARCHITECTURES[architecture]

    def make() -> nn.Module:
        model = entry.make(**(options or {}))
        return lora(model) if adapters else model

    return Training(
        model=make,
        split=entry.split,
        loss=None if entry.own_loss else class_loss,
        dataset=Samples(entry.task, variable=variable, unlabelled=frozenset(unlabelled)),
        collate=pad if variable else None,
        optimizer=lambda named: torch.optim.AdamW(
            [parameter for _, parameter in named], lr=learning_rate, weight_decay=0.1
        ),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7),
        metrics=accuracy,
    )
