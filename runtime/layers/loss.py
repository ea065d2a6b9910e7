"""The loss of some rows of a microbatch, as a sum and a weight.

The loss of a global batch is the sum of all sums divided by the sum of all weights. A weight counts tokens
(labels of -100 are ignored) or rows. The division happens once, before the update, so the loss does not
depend on how the batch was cut into microbatches, pipelines and devices. Auxiliary terms in a Hugging Face
model's own loss (expert balancing) count with the weight of their microbatch.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runtime.data.batches import describe_type, leaves_of, map_tensors, slice_rows
from runtime.errors import TrainingError, errors_of
from runtime.layers.chain import LayerChain
from runtime.layers.windows import WindowedModule
from runtime.sources.collators import IGNORED_LABEL
from runtime.training import Batch, Training
from statemachine.messages.values import MAX_METRIC_NAME_CHARACTERS, MAX_METRICS

_PROBED = 3
"""Number of labels per row that are used to find out which labels a loss counts."""
_REMEDY = (
    "return (sum, weight) instead, for example (cross_entropy(…, reduction='sum'), (target != -100).sum())"
)
_COMPARING = "if it compares rows (contrastive), let a sample be a group of such rows, and set microbatch = 1"


class Loss:
    """The user's loss function, or the loss that the model itself computes.

    :param tolerance: relative difference between the loss of a microbatch and the sum of its parts that
        rounding may cause.
    :raises TrainingError: the training has no loss function, and the model computes no loss.
    """

    def __init__(self, training: Training, structure: LayerChain | WindowedModule, tolerance: float) -> None:
        self._tolerance = tolerance
        self._function = training.loss
        self._metrics = training.metrics
        self._takes_target = isinstance(structure, LayerChain)
        self._root: nn.Module | None = None if isinstance(structure, LayerChain) else structure.root
        self._couples_rows = structure.couples_rows
        self.nominal_weight = 1.0
        """Approximate weight of a row. It keeps sums in the range of means, so that float16 does not overflow."""
        self.metric_names: tuple[str, ...] = ()
        """Names of the job's own metrics, sorted; the same in every trainer."""
        self._known_metrics: set[str] | None = None
        """Names that need no warning: of the metrics that are reported, and of those with a warning already."""
        self._shifts = False
        """Whether the model's own loss predicts each next token and therefore ignores the first label of a
        row.
        """

    def __call__(
        self,
        output: Any,
        batch: Batch,
        rows: int,
        host_batch: Batch | None = None,
        microbatch: tuple[Batch, int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum and the weight of the loss of some rows.

        :param host_batch: the batch in host memory, where labels are counted without waiting for the
            device.
        :param microbatch: the microbatch that the rows are part of, in host memory, and the number of its rows;
            by default these rows are all of it.
        :raises TrainingError: the loss cannot be computed, or is a mean that depends on how rows are
            grouped.
        """
        host_batch = batch if host_batch is None else host_batch
        if self._function is None:
            return self._model_loss(output, host_batch, rows)
        value = self._function(_in_float32(output), batch[1] if self._takes_target else batch)
        if isinstance(value, tuple | list):
            return _pair(value)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise TrainingError("the loss must return one number (a scalar tensor) or a pair (sum, weight)")
        whole, whole_rows = microbatch or (host_batch, rows)
        self._check_masks(whole[1] if self._takes_target else whole, whole_rows)
        return value.squeeze() * rows, torch.tensor(float(rows), dtype=torch.float64)

    def mean(self, output: Any, batch: Batch, rows: int) -> Tensor:
        """Return the loss of a microbatch as a mean, 0 if nothing in it counts."""
        mean: Tensor = _mean(*self(output, batch, rows))
        return mean

    def compute_metrics(self, output: Any, batch: Batch, rows: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the job's own metrics as (sum, weight) in float64, without waiting for the device.

        :raises TrainingError: ``Training.metrics`` returned something other than scalars or pairs by name.
        """
        if self._metrics is None:
            return {}
        with torch.no_grad():
            found = self._metrics(_in_float32(output), batch)
        if not isinstance(found, Mapping):
            raise TrainingError(f"Training.metrics must return a dict by name, not {type(found).__name__}")
        metrics = {}
        for name, value in found.items():
            is_pair = isinstance(value, tuple | list)
            try:
                numbers = [torch.as_tensor(one).detach() for one in (value if is_pair else (value,))]
            except (TypeError, ValueError, RuntimeError):
                numbers = []
            if len(numbers) != (2 if is_pair else 1) or not all(map(_is_real_number, numbers)):
                raise TrainingError(
                    f"the metric {name!r} must be a number or a pair (sum, weight) of numbers, not "
                    f"{describe_type(value)}"
                )
            first, *weights = (one.double().squeeze() for one in numbers)
            if is_pair:
                metrics[str(name)] = (first, weights[0])
            else:
                metrics[str(name)] = (first * rows, torch.tensor(float(rows), dtype=torch.float64))
        if self._known_metrics is not None and (unknown := metrics.keys() - self._known_metrics):
            self._known_metrics |= unknown
            warnings.warn(
                f"Training.metrics returned {', '.join(sorted(unknown))}, which it did not return for the first "
                "samples, so that nothing reports it; return the same names for all samples, with (0, 0) where nothing "
                "counts",
                stacklevel=2,
            )
        return metrics

    def check(
        self,
        output: Any,
        batch: Batch,
        rows: int,
        *,
        whole: Callable[[Batch, int, int], Any],
        last: Callable[[Batch], Any],
        verified: bool = False,
    ) -> None:
        """Find out what the model's own loss is a mean over, and compare the loss of a microbatch with that of
        its parts.

        :param output: the model's output for all rows.
        :param whole: runs the model in evaluation mode on a batch of so many rows; its last argument, the number of the
            first row, selects the random numbers that the model draws.
        :param last: runs the last layer in evaluation mode on all rows, with other labels in the batch.
        :param verified: skip the comparison because another trainer makes it.
        :raises TrainingError: the loss fails, or is not a mean over rows.
        """
        if self._function is None:
            self._shifts = self._ignores_first_label(batch, last)
        with errors_of("the loss"):
            total, weight = self(output, batch, rows)
        self.nominal_weight = max(float(weight), 1.0) / rows
        self.metric_names = _names(self.compute_metrics(output, batch, rows))
        self._known_metrics = set(self.metric_names)
        if rows < 2 or self._couples_rows or verified:
            return
        cuts = [(0, 1), (1, rows)]
        parts = [slice_rows(batch, start, end, rows) for start, end in cuts]
        cuttable = self._function is not None and isinstance(output, Tensor | tuple | list | Mapping)
        with errors_of(
            "the loss", f" on a part of the microbatch's rows, on which it must work, too ({_COMPARING})"
        ):
            found = [
                self(
                    _rows(output, *cut, rows) if cuttable else whole(part, cut[1] - cut[0], cut[0]),
                    part,
                    cut[1] - cut[0],
                )
                for part, cut in zip(parts, cuts, strict=True)
            ]
            if not cuttable:
                total, weight = self(whole(batch, rows, 0), batch, rows)
        sums, weights = sum(float(s) for s, _ in found), sum(float(w) for _, w in found)
        if not math.isfinite(sums) or (
            self._close(float(total), sums) and self._close(float(weight), weights)
        ):
            return
        with errors_of("the loss"):
            again, _ = self(output if cuttable else whole(batch, rows, rows), batch, rows)
        if not self._close(float(total), float(again)):
            return  # It depends on random numbers, so parts cannot be compared: each microbatch draws its own.
        if self._function is not None and self._close(
            float(total) / rows, sum(float(s) / (e - b) for (s, _), (b, e) in zip(found, cuts, strict=True))
        ):
            raise TrainingError(
                'the loss sums over samples; take the mean (reduction="mean"), or return the pair (sum, number of '
                "elements) for a mean over elements"
            )
        raise TrainingError(
            f"the loss of {rows} rows is {float(_mean(total, weight)):.6g} (weight {float(weight):g}), but its "
            f"parts give {_mean(sums, weights):.6g} (weight {weights:g}), so it would depend on how rows are grouped; "
            f"{_REMEDY}; {_COMPARING}"
        )

    def _close(self, one: float, other: float) -> bool:
        return abs(one - other) <= self._tolerance * max(abs(one), abs(other)) + 1e-6

    # --- the model's own loss -----------------------------------------------------------------------------

    def _model_loss(self, output: Any, batch: Batch, rows: int) -> tuple[Tensor, Tensor]:
        value = own_loss(output)
        if value is None:
            labels = (
                "; the samples have no 'labels'"
                if isinstance(batch, Mapping) and "labels" not in batch
                else ""
            )
            raise TrainingError(
                f"{type(self._root).__name__} returned no loss{labels}. Give the samples labels, or the training "
                "a loss: Training(loss=lambda output, batch: ...)"
            )
        weight = self._model_loss_weight(batch, rows)
        if weight == 0:
            # The mean over no tokens is NaN, and so would be its gradient.
            return value.new_zeros(()), torch.tensor(0.0, dtype=torch.float64)
        # Models compute their loss in float32, whatever the type of their parameters. The sum is not
        # rounded again.
        return value.squeeze().double() * weight, torch.tensor(float(weight), dtype=torch.float64)

    def _model_loss_weight(self, batch: Batch, rows: int) -> int:
        """Return how many items the model's own loss is a mean over: labels that are not ignored, or rows."""
        if not isinstance(batch, Mapping):
            return rows
        shifted = batch.get("shift_labels")
        labels = batch.get("labels")
        if isinstance(shifted, Tensor):
            labels = shifted
        elif isinstance(labels, Tensor) and self._shifts:
            labels = labels[..., 1:]
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return rows
        return int((labels != IGNORED_LABEL).sum())

    def _ignores_first_label(self, batch: Batch, last: Callable[[Batch], Any]) -> bool:
        """Return whether the model's own loss ignores the first label of each row.

        Class names do not show (a ``T5ForConditionalGeneration`` does not ignore it, a
        ``LlavaForConditionalGeneration`` does). The method therefore compares two losses over a few labels,
        one with the first label and one without it.
        """
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() != 2:
            return False
        counted = labels[labels != IGNORED_LABEL]
        tokens = batch.get("input_ids")
        if not len(counted) and isinstance(tokens, Tensor):
            counted = tokens.flatten().to(labels)
        if labels.shape[1] < _PROBED or not len(counted):
            return False
        few = torch.full_like(labels, IGNORED_LABEL)
        # These are labels or tokens of the batch, so they are in the vocabulary.
        few[:, :_PROBED] = counted[torch.arange(_PROBED, device=labels.device) % len(counted)]
        fewer = few.clone()
        fewer[:, 0] = IGNORED_LABEL
        given = dict(batch)
        made = getattr(self._root, "prepare_decoder_input_ids_from_labels", None)
        if callable(made) and given.get("decoder_input_ids") is None:
            given["decoder_input_ids"] = made(labels=labels)
        try:
            one, other = (own_loss(last({**given, "labels": tried})) for tried in (few, fewer))
        except Exception:
            return False  # The model uses these labels for something else.
        return one is not None and other is not None and bool(torch.equal(one, other))

    def _check_masks(self, target: Batch, rows: int) -> None:
        """Reject a mean over targets if the rows have different numbers of ignored ones."""
        for leaf in leaves_of(target):
            if isinstance(leaf, Tensor) and leaf.dtype == torch.int64 and leaf.dim() and len(leaf) == rows:
                ignored = (leaf == IGNORED_LABEL)[:, None].flatten(1).sum(1)
                if int(ignored.min()) != int(ignored.max()):
                    raise TrainingError(
                        "the loss is a single number, but rows have unequal numbers of targets that are -100, so "
                        f"a mean over tokens would depend on how rows are grouped; {_REMEDY}"
                    )


def _in_float32(output: Any) -> Any:
    """Return a model's output with lower-precision tensors converted to float32, which a mean over a batch
    needs.
    """
    if isinstance(output, Mapping) and type(output) is not dict:
        return type(output)(**_in_float32(dict(output)))
    low = (torch.bfloat16, torch.float16)
    return map_tensors(lambda tensor: tensor.float() if tensor.dtype in low else tensor, output)


def _rows(output: Any, start: int, end: int, rows: int) -> Any:
    """Return rows [start, end) of a model's output, as an object of the same type."""
    if isinstance(output, Mapping) and type(output) is not dict:
        return type(output)(**slice_rows(dict(output), start, end, rows))
    return slice_rows(output, start, end, rows)


def own_loss(output: Any) -> Tensor | None:
    """Return the loss in a model's output, or ``None`` if it has none."""
    value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if value is None and isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        value = output[0] if output[0].numel() == 1 else None
    return value if isinstance(value, Tensor) else None


def _pair(value: Any) -> tuple[Tensor, Tensor]:
    if len(value) != 2 or not isinstance(value[0], Tensor) or value[0].numel() != 1:
        raise TrainingError(
            "the loss must be a scalar or a pair (sum, weight), whose sum is a tensor with one number"
        )
    weight = torch.as_tensor(value[1]).detach().to(torch.float64)
    if weight.numel() != 1:
        raise TrainingError(f"the loss has a weight of {weight.numel()} numbers; it must be one")
    return value[0].squeeze(), weight.squeeze()


def _mean(total: Any, weight: Any) -> Any:
    return total / weight if weight else total


def _is_real_number(value: Tensor) -> bool:
    return value.numel() == 1 and not value.is_complex()


def _names(metrics: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the metrics' names in the order in which ranks sum them.

    :raises TrainingError: there are more than a step can carry, or a name is empty or too long.
    """
    if len(metrics) > MAX_METRICS:
        raise TrainingError(f"Training.metrics returned {len(metrics)} numbers; return at most {MAX_METRICS}")
    for name in metrics:
        if not 1 <= len(name) <= MAX_METRIC_NAME_CHARACTERS:
            raise TrainingError(
                f"Training.metrics returned a number under a name of {len(name)} characters ({name[:80]!r}); "
                f"write 1 to {MAX_METRIC_NAME_CHARACTERS}"
            )
    return tuple(sorted(metrics))
