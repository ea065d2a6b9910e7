"""Collators: padding of every kind of value, and the masks of masked language models."""

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.sources.collators import CausalCollate, MaskedLanguageModelCollate, PadCollate
from runtime.sources.errors import DataError
from tests.helpers.corpus import make_tokenizer


def sample(*tokens: int, **values: Any) -> dict[str, Any]:
    return {"input_ids": torch.tensor(tokens, dtype=torch.int64), **values}


def test_tokens_labels_and_masks_are_padded_each_in_its_way() -> None:
    samples = [
        sample(5, 6, 7, labels=[5, 6, 7], token_type_ids=[0, 1, 1]),
        sample(8, labels=[8], token_type_ids=[1]),
    ]
    batch = PadCollate(3, multiple_of=4)(samples)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[5, 6, 7, 3], [8, 3, 3, 3]],
        "labels": [[5, 6, 7, -100], [8, -100, -100, -100]],
        "token_type_ids": [[0, 1, 1, 0], [1, 0, 0, 0]],
        "attention_mask": [[1, 1, 1, 0], [1, 0, 0, 0]],
    }
    assert {value.dtype for value in batch.values()} == {torch.int64}


def test_lengths_of_batches() -> None:
    samples = [sample(*range(9)), sample(1)]
    assert PadCollate(0)(samples)["input_ids"].shape == (2, 16)
    assert PadCollate(0, multiple_of=None)(samples)["input_ids"].shape == (2, 9)
    assert PadCollate(0, length=30)(samples)["input_ids"].shape == (2, 30)
    with pytest.raises(DataError, match='a sample\'s "input_ids" has 9 values, more than the length 8'):
        PadCollate(0, length=8)(samples)


def test_labels_with_other_lengths_and_classes() -> None:
    samples = [sample(5, 6, 7, labels=[1], weight=0.5), sample(8, labels=[2, 3], weight=2.0)]
    batch = PadCollate(0, multiple_of=None)(samples)
    assert batch["labels"].tolist() == [[1, -100], [2, 3]]
    assert batch["weight"].tolist() == [0.5, 2.0]
    batch = PadCollate(0, multiple_of=None)([sample(5, labels=1), sample(8, 9, labels=0)])
    assert batch["labels"].tolist() == [1, 0]


def test_whole_numbers_in_the_first_sample_do_not_cut_fractions_in_others() -> None:
    samples = [sample(5, 6, weights=[1, 0]), sample(8, weights=[0.5])]
    assert PadCollate(0, multiple_of=None)(samples)["weights"].tolist() == [[1.0, 0.0], [0.5, 0.0]]


def test_a_sample_without_tokens_leaves_those_of_others_whole_numbers() -> None:
    batch = CausalCollate(0, multiple_of=None)([{"input_ids": []}, {"input_ids": [1, 2]}])
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[0, 0], [1, 2]],
        "attention_mask": [[0, 0], [1, 1]],
        "labels": [[-100, -100], [1, 2]],
    }
    assert {value.dtype for value in batch.values()} == {torch.int64}


def test_a_mask_of_the_samples_is_used() -> None:
    samples = [sample(5, 6, attention_mask=[0, 1]), sample(8, attention_mask=[1])]
    assert PadCollate(0, multiple_of=None)(samples)["attention_mask"].tolist() == [[0, 1], [1, 0]]


def test_labels_are_added_for_causal_models() -> None:
    batch = CausalCollate(0, multiple_of=None)([sample(5, 6), sample(8)])
    assert batch["labels"].tolist() == [[5, 6], [8, -100]]
    batch = CausalCollate(0, multiple_of=None)([sample(5, labels=[4]), sample(8, labels=[3])])
    assert batch["labels"].tolist() == [[4], [3]]


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([(1, 2)], 'must be dicts with "input_ids" to be padded; this one is a tuple'),
        ([{"pixels": [1]}], r'must be dicts with "input_ids" to be padded; this one has \[\'pixels\'\]'),
        ([sample(1), sample(2, labels=[1])], "samples of one batch must have the same names"),
        ([sample(1, text="a"), sample(2, text="b")], 'the samples\' "text" must be numbers, not str'),
        (
            [sample(1, mask=torch.ones(2, 2)), sample(1, mask=torch.ones(3, 3))],
            r'the samples\' "mask" have unequal shapes \(2, 2\), \(3, 3\)',
        ),
    ],
)
def test_samples_that_do_not_fit(samples: list[Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        PadCollate(0)(samples)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"pad_token_id": None}, "pad_token_id must be a whole number of at least 0, not None"),
        ({"pad_token_id": -1}, "pad_token_id must be"),
        ({"pad_token_id": 0, "multiple_of": 0}, "multiple_of must be a whole number of at least 1"),
        ({"pad_token_id": 0, "length": "8"}, "length must be a whole number of at least 1"),
    ],
)
def test_numbers_of_padding_that_make_no_sense(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        PadCollate(**arguments)


def masking(**arguments: Any) -> MaskedLanguageModelCollate:
    return MaskedLanguageModelCollate(
        mask_token_id=4, vocabulary_size=1000, pad_token_id=0, special_token_ids=(0, 1, 2), **arguments
    )


def test_shares_of_masks_are_those_of_bert() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(5, 1000, (64, 1024))
    batch = masking()([{"input_ids": row} for row in tokens])
    chosen = batch["labels"] != -100
    assert torch.equal(batch["labels"][chosen], tokens[chosen])
    assert torch.equal(batch["input_ids"][~chosen], tokens[~chosen])
    assert chosen.double().mean() == pytest.approx(0.15, abs=0.01)
    masked, same = batch["input_ids"] == 4, batch["input_ids"] == tokens
    assert masked[chosen].double().mean() == pytest.approx(0.8, abs=0.02)
    assert same[chosen].double().mean() == pytest.approx(0.1, abs=0.02)
    other = batch["input_ids"][chosen & ~masked & ~same]
    assert len(other) == pytest.approx(0.015 * tokens.numel(), rel=0.1)
    assert len(other.unique()) > 500


def test_special_tokens_and_padding_are_never_masked() -> None:
    torch.manual_seed(0)
    samples = [sample(1, 7, 8, 2), sample(1, 2), sample(9, 9, special_tokens_mask=[1, 0])]
    batch = masking(probability=1.0, multiple_of=None)(samples[:2])
    assert batch["labels"].tolist() == [[-100, 7, 8, -100], [-100] * 4]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    batch = masking(probability=1.0, multiple_of=None)(samples[2:])
    assert batch["labels"].tolist() == [[-100, 9]]
    assert "special_tokens_mask" not in batch


def test_the_same_generator_makes_the_same_batch() -> None:
    samples = [sample(*range(5, 105), labels=list(range(5, 105)))]
    torch.manual_seed(7)
    first = masking()(samples)
    torch.manual_seed(7)
    second = masking()(samples)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert samples[0]["input_ids"].tolist() == list(range(5, 105))
    assert not torch.equal(first["input_ids"], masking()(samples)["input_ids"])


def test_token_ids_come_from_a_tokenizer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    collate = MaskedLanguageModelCollate(str(make_tokenizer(tmp_path)), probability=1.0, multiple_of=4)
    batch = collate([sample(0, *range(10, 500)), sample(0, 12)])
    assert batch["labels"][:, 0].tolist() == [-100, -100]
    assert (batch["input_ids"][0] == 2).double().mean() == pytest.approx(0.8, abs=0.06)
    assert set(batch["input_ids"][1, 2:].tolist()) == {1}


def test_no_special_tokens_are_given_by_an_empty_list(tmp_path: Path) -> None:
    tokenizer = str(make_tokenizer(tmp_path))
    collate = MaskedLanguageModelCollate(tokenizer, probability=1.0, special_token_ids=[])
    assert collate([sample(0, 12)])["labels"][0, :2].tolist() == [0, 12]


def test_masking_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="masking needs mask_token_id, vocabulary_size and pad_token_id or a"):
        MaskedLanguageModelCollate()
    with pytest.raises(DataError, match="probability must lie between 0 and 1, not 15"):
        masking(probability=15)
    with pytest.raises(DataError, match="mask_token_id 4 is outside the vocabulary of 3 entries"):
        MaskedLanguageModelCollate(mask_token_id=4, vocabulary_size=3, pad_token_id=0)
    directory = make_tokenizer(tmp_path)
    (directory / "tokenizer_config.json").unlink()
    text = (directory / "tokenizer.json").read_text().replace("<|mask|>", "<|other|>")
    (directory / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match=rf"the tokenizer {directory} does not name them all"):
        MaskedLanguageModelCollate(str(directory))
