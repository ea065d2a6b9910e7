"""The tables of a job file that train a Hugging Face model without a training function. The module does not
import torch.

``ftd`` reads and checks them on the user's machine, and passes them as arguments to the function
``RECIPE``, with absolute paths. The trainers read them with the same declarations.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

RECIPE = "runtime.recipe:build"
"""The training function of a job file with ``[model]``."""

Task = Literal["causal-lm", "masked-lm", "seq2seq-lm", "image-classification", "sequence-classification"]
TokenType = Literal["uint8", "uint16", "uint32", "int16", "int32", "int64"]

LARGEST_NUMBER = 1e30
"""Largest number that makes sense anywhere; it excludes infinity."""

Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0, le=LARGEST_NUMBER)]
NotNegative = Annotated[float, Meta(ge=0, le=LARGEST_NUMBER)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]

BYTES = "bytes"
"""The tokenizer that needs no file: one token per byte of UTF-8."""


class LoraTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[model.lora]``: train small matrices next to the model's frozen weights (peft)."""

    rank: Count = 8
    """Rank of the adapters' matrices."""
    alpha: Positive = 16.0
    """The adapters' outputs are scaled by ``alpha / rank``."""
    dropout: Fraction = 0.0
    """Share of an adapter's inputs that is dropped."""
    target_modules: str | list[str] = "all-linear"
    """Names of the modules that get adapters (``["q_proj", "v_proj"]``), or all linear ones but the head."""


class ModelTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[model]``: a Hugging Face model, in place of a training function."""

    huggingface: Annotated[str | None, Meta(examples=["model"])] = None
    """Directory with ``config.json`` and, if the model is trained already, safetensors weights; relative to
    the job file. Or the name of a model in the local Hugging Face cache."""
    architecture: Annotated[str | None, Meta(examples=["llama"])] = None
    """Model type of transformers, in place of ``huggingface``; ``[model.overrides]`` has its sizes."""
    task: Annotated[Task | None, Meta(examples=["causal-lm"])] = None
    """Task for which the model is trained; default: the one of its configuration, or the usual one of its type."""
    weights: Literal["auto", "random", "required"] = "auto"
    """``auto``: start from the directory's weights, or from random ones where it has none."""
    new: list[str] = []
    """Names or patterns (``"score.*"``) of weights that begin with random values, whatever the files have."""
    attention: Annotated[Literal["sdpa", "eager"] | None, Meta(examples=["sdpa"])] = None
    """Implementation of attention; left out: torch's fused one (``sdpa``) where the architecture has it."""
    overrides: dict[str, Any] = {}
    """Values that replace those of the model's configuration."""
    lora: LoraTable | None = None
    """Train adapters in place of the weights; left out: train all weights."""


class DataTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[data]``: the data on which the model trains; exactly one of the first six keys."""

    tokens: Annotated[str | list[str] | None, Meta(examples=["tokens/*.bin"])] = None
    """Files of token ids without a header; a path or glob relative to the job file, or a list of them."""
    text: Annotated[str | list[str] | None, Meta(examples=["text/*.jsonl"])] = None
    """Files of text: JSON lines, Parquet or Arrow with a field of text, others as plain text; a path or glob,
    or a list of them."""
    instructions: Annotated[str | list[str] | None, Meta(examples=["chats/*.jsonl"])] = None
    """Files with records of ``prompt`` and ``completion``, or of ``messages``; only the answers are learned."""
    megatron: Annotated[str | None, Meta(examples=["megatron/corpus_text_document"])] = None
    """Megatron's indexed data set: the path of its ``.bin`` and ``.idx`` files without the ending."""
    images: Annotated[str | None, Meta(examples=["images.npz"])] = None
    """File of numpy with the arrays ``images`` (bytes) and ``labels`` (classes)."""
    huggingface: Annotated[str | None, Meta(examples=["dataset"])] = None
    """Directory that ``datasets.Dataset.save_to_disk`` wrote, with the columns that the model takes."""
    dtype: Annotated[TokenType | None, Meta(examples=["uint16"])] = None
    """Type of the ids in token files; left out: what a ``.npy`` or the file's ``.json`` says, or uint16."""
    tokenizer: Annotated[str | None, Meta(examples=["tokenizer"])] = None
    """Directory with a ``tokenizer.json``, or ``bytes``: one token per byte; left out: the tokenizer in the
    model's directory. Text needs one."""
    field: str = "text"
    """Key (JSON lines) or column (Parquet) with the text."""
    packing: bool = True
    """Fill every sample with documents up to ``length``; false: one document a sample, padded per batch."""
    end_of_text: bool | str = True
    """Whether a token ends each document: the tokenizer's own, or the one that is named."""
    cache: Annotated[str | None, Meta(examples=["cache"])] = None
    """Directory in which every node keeps the tokens of its text; left out: ``~/.cache/ftd``."""
    length: Annotated[Count | None, Meta(examples=[1024])] = None
    """Tokens of a sample; left out: 1024, or as many as the model takes where that is less."""
    collate: Literal["auto", "pad", "masked-lm"] = "auto"
    """Way in which samples become a batch: ``pad`` to the longest, ``masked-lm`` pads and masks tokens;
    ``auto``: what the task and the data need.
    """
    mask_probability: Annotated[float, Meta(gt=0, lt=1)] = 0.15
    """Share of the tokens that masked language models predict."""
    workers: CountOrZero = 0
    """Processes per trainer that read samples ahead; 0: the trainer reads them itself."""


class OptimizerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[optimizer]``: an optimizer of torch."""

    name: Literal["adamw", "adam", "sgd", "adafactor"] = "adamw"
    """Class in ``torch.optim``."""
    learning_rate: Positive = 3e-4
    """Highest rate, after the warm-up."""
    weight_decay: Annotated[NotNegative | None, Meta(examples=[0.1])] = None
    """Weight decay; left out: 0.1 for adamw, 0 for the others."""
    decay_all: bool = False
    """Also decay norms and biases (parameters with fewer than two dimensions)."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Averaging factors of adamw and adam."""
    eps: Positive = 1e-8
    """Term in the denominator of adamw and adam."""
    momentum: Fraction = 0.9
    """Momentum of sgd."""
    fused: bool = True
    """Update all parameters in one kernel; adafactor has none."""


class ScheduleTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[schedule]``: the learning rate over the job's steps."""

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Course after the warm-up; ``wsd`` (warm-up, stable, decay) stays constant, then falls linearly."""
    warmup_steps: Annotated[CountOrZero | None, Meta(examples=[100])] = None
    """Steps in which the rate rises linearly from 0; left out: by ``warmup_ratio``."""
    warmup_ratio: Annotated[Fraction | None, Meta(examples=[0.03])] = None
    """The warm-up as a share of all steps, in place of ``warmup_steps``; left out: 0.03."""
    decay_ratio: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """Share of all steps, at the end, in which ``wsd`` falls."""
    final_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Rate of the last step as a share of ``learning_rate``; ``constant`` does not fall."""


class EvaluationTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[evaluation]``: the loss on data that is not trained on."""

    every_steps: CountOrZero = 0
    """Evaluate after every so many steps and after the last one; 0: never."""
    batches: CountOrZero = 0
    """Global batches of one evaluation; 0: all of the held-out data."""
    fraction: Annotated[Annotated[float, Meta(gt=0, le=0.5)] | None, Meta(examples=[0.01])] = None
    """Share of the samples of ``[data]`` that is held out, evenly spaced; left out: 0.01, unless there is
    ``[evaluation.data]``."""
    data: DataTable | None = None
    """Data that is only evaluated, with the keys of ``[data]``."""


class FileTotals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Number and total size of the files that a key of the job file names."""

    files: int
    bytes: int


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of ``RECIPE``."""

    model: ModelTable
    data: DataTable
    optimizer: OptimizerTable = OptimizerTable()
    schedule: ScheduleTable = ScheduleTable()
    evaluation: EvaluationTable = EvaluationTable()
    steps: int
    files: dict[str, FileTotals] = {}
    """Files of each key of the job file (``data.text``) on the host that submitted the job."""


def merge_tables(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` with those of ``overrides``: tables are merged, and other values are replaced."""
    merged = dict(values)
    for name, value in overrides.items():
        known = merged.get(name)
        both = isinstance(known, dict) and isinstance(value, dict)
        merged[name] = merge_tables(known, value) if both else value  # type: ignore[arg-type]
    return merged
