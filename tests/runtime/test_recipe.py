"""Tests of recipes: the model, data, optimizer and schedule that a job file's tables describe."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from runtime.description import describe
from runtime.errors import TrainingError
from runtime.recipe import build
from runtime.recipe.datasets import Split, byte_tokenizer
from runtime.recipe.models import load_model
from runtime.recipe.optimization import make_optimizer, make_scheduler, schedule_factor
from runtime.recipe.saved_dataset import image_preparation
from runtime.sources.errors import DataError
from runtime.sources.tokenizer import load_tokenizer
from runtime.sources.used_files import count_files
from runtime.training import Training, load_training
from runtime.wire.recipe import RECIPE, FileTotals, ModelTable, OptimizerTable, Recipe, ScheduleTable
from statemachine.messages.trainer import TrainingData
from tests.helpers.corpus import make_tokenizer, sentence, write_lines
from tests.helpers.deferred import whole
from tests.helpers.small_models import MODELS, model_of

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    """Write a file of 2048 token ids from 0 to 99."""
    path = tmp_path / "tokens.bin"
    (np.arange(2048) % 100).astype("<u2").tofile(path)
    return str(path)


@pytest.fixture
def text(tmp_path: Path) -> str:
    return str(write_lines(tmp_path / "text.jsonl", [{"text": sentence(i)} for i in range(60)]))


def saved(directory: Path, kind: str = "llama", **options: Any) -> str:
    """Save a random model as ``save_pretrained`` does, and return its directory."""
    model_of(kind, **options).save_pretrained(directory)
    return str(directory)


def built(model: dict[str, Any], data: dict[str, Any], **others: Any) -> Training:
    return build(model=model, data=data, steps=100, **others)


def made(training: Training) -> Any:
    """Return the model that a training function's callable makes."""
    assert callable(training.model)
    return training.model()


def from_sizes(**changes: Any) -> dict[str, Any]:
    return {"architecture": "llama", "overrides": {**LLAMA, "vocab_size": 100, **changes}}


def sizes(kind: str) -> dict[str, Any]:
    """Return the sizes of a small model, without those that its configuration does not know."""
    return {k: v for k, v in MODELS[kind][1].items() if k not in ("vocab_size", "num_key_value_heads")}


# --- the model ---------------------------------------------------------------------------------------


def test_the_function_is_found_and_seeded(tokens: str, tmp_path: Path) -> None:
    data = TrainingData(
        function=RECIPE,
        path=str(tmp_path),
        seed=3,
        steps=100,
        global_batch=4,
        microbatch_rows=2,
        arguments={"model": from_sizes(), "data": {"tokens": tokens}, "steps": 100},
    )
    first, second, other = (load_training(d) for d in (data, data, msgspec.structs.replace(data, seed=4)))
    weights = [whole(t.model).lm_head.weight for t in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_tables_of_another_version_are_rejected(tokens: str) -> None:
    with pytest.raises(TrainingError, match=r"unknown field `gone`.*submit it with this version"):
        built(from_sizes() | {"gone": 1}, {"tokens": tokens})


def test_an_architecture_takes_vocabulary_and_special_tokens_from_the_tokenizer(text: str) -> None:
    training = built({"architecture": "llama", "overrides": LLAMA}, {"text": text, "tokenizer": "bytes"})
    config = made(training).config
    assert (config.vocab_size, config.eos_token_id, config.pad_token_id) == (259, 256, 257)
    assert config.use_cache is False
    assert config._attn_implementation == "sdpa"
    overrides = {**LLAMA, "vocab_size": 512}
    training = built({"architecture": "llama", "overrides": overrides}, {"text": text, "tokenizer": "bytes"})
    assert made(training).config.vocab_size == 512


def test_what_follows_from_sizes_follows_from_the_overrides(tokens: str) -> None:
    assert made(built(from_sizes(), {"tokens": tokens})).config.head_dim == 8
    gpt2 = {"architecture": "gpt2", "overrides": {"hidden_size": 24, "n_head": 4, "n_layer": 1}}
    assert made(built(gpt2, {"tokens": tokens})).config.n_embd == 24


def test_overrides_replace_values_of_the_directory_s_configuration(tmp_path: Path, tokens: str) -> None:
    rope = {"rope_theta": 123.0}
    overrides = {"num_hidden_layers": 1, "rope_parameters": rope, "attention_dropout": 0.25}
    model = {"huggingface": saved(tmp_path / "model"), "weights": "random", "overrides": overrides}
    config = made(built(model, {"tokens": tokens})).config
    assert (config.num_hidden_layers, config.attention_dropout, config.hidden_size) == (1, 0.25, 32)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 123.0}


def test_weights_are_those_of_the_directory(tmp_path: Path, tokens: str) -> None:
    place = saved(tmp_path / "model")
    model = made(built({"huggingface": place, "attention": "eager"}, {"tokens": tokens}))
    wanted = model_of("llama").state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    assert model.config._attn_implementation == "eager"
    assert all(p.dtype == torch.float32 for p in model.parameters())
    fresh = made(built({"huggingface": place, "weights": "random"}, {"tokens": tokens}))
    assert not torch.equal(fresh.lm_head.weight, wanted["lm_head.weight"])


def test_a_directory_without_weights_begins_with_random_ones(tmp_path: Path, tokens: str) -> None:
    place = Path(saved(tmp_path / "model"))
    (place / "model.safetensors").unlink()
    assert made(built({"huggingface": str(place)}, {"tokens": tokens})).config.vocab_size == 100
    with pytest.raises(TrainingError, match=r"has neither model\.safetensors nor"):
        made(built({"huggingface": str(place), "weights": "required"}, {"tokens": tokens}))


def test_all_weights_that_do_not_fit_are_named(tmp_path: Path, tokens: str) -> None:
    place = saved(tmp_path / "model")
    model = {"huggingface": place, "overrides": {"vocab_size": 120, "num_hidden_layers": 3}}
    with pytest.raises(TrainingError) as caught:
        made(built(model, {"tokens": tokens}))
    message = str(caught.value)
    assert "model.embed_tokens.weight (100, 32) instead of (120, 32)" in message
    assert "missing" in message and "layers.2" in message


def test_weights_may_be_initialised_by_name(tmp_path: Path, tokens: str) -> None:
    model = {
        "huggingface": saved(tmp_path / "model", tied=False),
        "new": ["model.layers.1.*", "lm_head.weight"],
    }
    made_of, wanted = made(built(model, {"tokens": tokens})), model_of("llama", tied=False)
    assert torch.equal(made_of.model.layers[0].mlp.up_proj.weight, wanted.model.layers[0].mlp.up_proj.weight)
    assert not torch.equal(
        made_of.model.layers[1].mlp.up_proj.weight, wanted.model.layers[1].mlp.up_proj.weight
    )
    assert not torch.equal(made_of.lm_head.weight, wanted.lm_head.weight)


def test_a_classifier_s_head_may_be_new(tmp_path: Path) -> None:
    place = saved(tmp_path / "bert", "bert")
    data = classified(tmp_path)
    model = {"huggingface": place, "task": "sequence-classification", "overrides": {"num_labels": 3}}
    classifier = made(built(model, {"huggingface": data}))
    wanted = model_of("bert").state_dict()
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert torch.equal(classifier.state_dict()[name], wanted[name])
    assert classifier.classifier.weight.shape == (3, 32)
    classifier.save_pretrained(tmp_path / "classifier")
    again = made(built(model | {"huggingface": str(tmp_path / "classifier")}, {"huggingface": data}))
    assert torch.equal(again.classifier.weight, classifier.classifier.weight)
    model = model | {"huggingface": str(tmp_path / "classifier"), "overrides": {"num_labels": 5}}
    assert made(built(model, {"huggingface": data})).classifier.weight.shape == (5, 32)


def test_files_of_the_tokenizer_are_stored_for_exports(tmp_path: Path, text: str, tokens: str) -> None:
    place = Path(saved(tmp_path / "model"))
    (place / "tokenizer_config.json").write_text('{"of": "the model"}')
    training = built({"huggingface": str(place)}, {"tokens": tokens})
    files = describe(made(training), training.files_from).files
    assert files["tokenizer_config.json"] == b'{"of": "the model"}'
    training = built({"architecture": "llama", "overrides": LLAMA}, {"text": text, "tokenizer": "bytes"})
    files = describe(made(training), training.files_from).files
    assert files["tokenizer.json"] == Path(byte_tokenizer()).read_bytes()
    model = {"huggingface": str(place), "weights": "random", "overrides": {"vocab_size": 300}}
    training = built(model, {"text": text, "tokenizer": "bytes"})
    assert "tokenizer_config.json" not in describe(made(training), training.files_from).files


def test_lora_freezes_the_weights_and_trains_adapters(tmp_path: Path, tokens: str) -> None:
    place = saved(tmp_path / "model")
    model = {"huggingface": place, "lora": {"rank": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]}}
    adapted = made(built(model, {"tokens": tokens}))
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 2
    assert all("lora_" in name for name in trained)
    base = "model.layers.0.self_attn.q_proj.base_layer.weight"
    assert torch.equal(
        adapted.state_dict()[base], model_of("llama").state_dict()[base.replace("base_layer.", "")]
    )
    everywhere = made(built({"huggingface": place, "lora": {}}, {"tokens": tokens}))
    assert sum("lora_A" in name for name, _ in everywhere.named_parameters()) == 2 * 7
    with pytest.raises(TrainingError, match=r"target_modules.*linear modules are .*q_proj"):
        made(built({"huggingface": place, "lora": {"target_modules": ["query"]}}, {"tokens": tokens}))


@pytest.mark.parametrize("kind", ["bert", "t5", "gpt2", "resnet"])
def test_the_task_is_the_usual_one_of_the_architecture(kind: str, tmp_path: Path, text: str) -> None:
    tokenizer = str(make_tokenizer(tmp_path / "tokenizer"))
    data: dict[str, Any] = {"text": text, "tokenizer": tokenizer, "length": 16}
    overrides = sizes(kind)
    if kind == "t5":
        data = {"huggingface": pairs(tmp_path), "tokenizer": tokenizer}
        overrides["decoder_start_token_id"] = 0
    if kind == "resnet":
        data = {"huggingface": pictures(tmp_path)}
    model = made(built({"architecture": kind, "overrides": overrides}, data))
    assert (
        type(model).__name__
        == {
            "bert": "BertForMaskedLM",
            "t5": "T5ForConditionalGeneration",
            "gpt2": "GPT2LMHeadModel",
            "resnet": "ResNetForImageClassification",
        }[kind]
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architecture": "lama"}, r"no architecture 'lama'; did you mean 'llama'"),
        ({"overrides": {"hiden_size": 3}}, r"llama has no hiden_size; did you mean 'hidden_size'"),
        ({"overrides": {"num_attention_heads": "four"}}, r"model.overrides: transformers rejects it"),
        ({"task": "image-classification"}, r"no llama for the task image-classification"),
        (
            {"huggingface": "/nowhere", "architecture": None},
            r"/nowhere/config.json does not exist on this host",
        ),
    ],
)
def test_a_model_that_cannot_be_made_is_rejected(tokens: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(TrainingError, match=says):
        made(built(from_sizes() | changes, {"tokens": tokens}))


def test_a_quantised_model_is_rejected(tmp_path: Path, tokens: str) -> None:
    place = Path(saved(tmp_path / "model"))
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(TrainingError, match="quantised"):
        built({"huggingface": str(place)}, {"tokens": tokens})


# --- the data ----------------------------------------------------------------------------------------


def dataset_of(directory: Path, columns: dict[str, list[Any]]) -> str:
    from datasets import Dataset

    Dataset.from_dict(columns).save_to_disk(str(directory))
    return str(directory)


def classified(directory: Path) -> str:
    rows = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    return dataset_of(directory / "classes", {"input_ids": rows, "label": [0, 2, 1], "text": ["a", "b", "c"]})


def pairs(directory: Path) -> str:
    return dataset_of(directory / "pairs", {"input_ids": [[5, 6, 7], [8, 9]], "labels": [[1, 2], [3, 4, 5]]})


def pictures(directory: Path) -> str:
    values = np.random.default_rng(0).random((4, 3, 32, 32), dtype=np.float32).tolist()
    return dataset_of(directory / "pictures", {"pixel_values": values, "labels": [0, 1, 0, 1]})


def samples(dataset: Any, count: int) -> list[Any]:
    return [dataset[index] for index in range(count)]


def test_token_files_become_samples_of_the_model_s_length(tokens: str) -> None:
    training = built(from_sizes(), {"tokens": tokens})
    assert len(training.dataset) == 2048 // 64
    assert training.dataset[1]["input_ids"].tolist() == [n % 100 for n in range(64, 128)]
    assert training.collate is None and training.evaluation is None
    assert len(built(from_sizes(), {"tokens": tokens, "length": 16}).dataset) == 2048 // 16


def test_a_length_beyond_the_models_is_rejected(tokens: str) -> None:
    with pytest.raises(TrainingError, match=r"data.length 65 is longer than the 64 tokens"):
        built(from_sizes(), {"tokens": tokens, "length": 65})
    held_out = {"every_steps": 5, "data": {"tokens": tokens, "length": 65}}
    with pytest.raises(TrainingError, match=r"evaluation\.data\.length 65 is longer than the 64 tokens"):
        built(from_sizes(), {"tokens": tokens}, evaluation=held_out)


@pytest.mark.parametrize(
    ("architecture", "longest"), [("roberta", 40 - 1 - 1), ("mpnet", 40 - 1 - 1), ("bert", 40)]
)
def test_the_longest_sample_has_no_more_tokens_than_the_model_has_positions(
    architecture: str, longest: int, tokens: str
) -> None:
    few = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    overrides = few | {"vocab_size": 100, "max_position_embeddings": 40, "pad_token_id": 1}
    model = {"architecture": architecture, "task": "masked-lm", "overrides": overrides}
    data = {"tokens": tokens, "tokenizer": "bytes"}
    training = built(model, data)
    (sample,) = samples(training.dataset, 1)
    assert len(sample["input_ids"]) == longest
    # No token is padding, so that all positions are used.
    made(training)(input_ids=torch.full((1, longest), 7))
    with pytest.raises(
        TrainingError, match=rf"data.length {longest + 1} is longer than the {longest} tokens"
    ):
        built(model, data | {"length": longest + 1})


def test_padding_may_leave_no_position_for_tokens(tokens: str) -> None:
    overrides = {"vocab_size": 100, "max_position_embeddings": 40, "pad_token_id": 60}
    model = {"architecture": "roberta", "task": "masked-lm", "overrides": overrides}
    with pytest.raises(TrainingError, match=r"data\.length 1 is longer than the 0 tokens that"):
        built(model, {"tokens": tokens, "tokenizer": "bytes"})


def test_an_architecture_may_have_no_limit(tokens: str) -> None:
    few = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "vocab_size": 100}
    training = built({"architecture": "xlnet", "task": "causal-lm", "overrides": few}, {"tokens": tokens})
    assert len(training.dataset[0]["input_ids"]) == 1024


def test_token_ids_outside_of_the_vocabulary_are_named_with_their_place(tokens: str) -> None:
    with pytest.raises(TrainingError, match=r"tokens\.bin, token 90: the token id 90 is outside"):
        built(from_sizes(vocab_size=90), {"tokens": tokens})


def test_text_is_packed_or_padded(text: str, tmp_path: Path) -> None:
    tokenizer = str(make_tokenizer(tmp_path / "tokenizer"))
    model = {"architecture": "llama", "overrides": LLAMA}
    packed = built(model, {"text": text, "tokenizer": tokenizer, "length": 16})
    assert {len(sample["input_ids"]) for sample in samples(packed.dataset, 5)} == {16}
    assert packed.collate is None
    single = built(model, {"text": text, "tokenizer": tokenizer, "packing": False})
    assert len(single.dataset) == 60
    assert single.collate is not None
    batch = single.collate(samples(single.dataset, 4))
    assert batch["labels"].shape == batch["input_ids"].shape
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()


def test_masked_language_models_mask_tokens(text: str, tmp_path: Path) -> None:
    tokenizer = str(make_tokenizer(tmp_path / "tokenizer"))
    overrides = sizes("bert")
    data = {"text": text, "tokenizer": tokenizer, "length": 64, "mask_probability": 0.5}
    training = built({"architecture": "bert", "overrides": overrides}, data)
    assert training.collate is not None
    batch = training.collate(samples(training.dataset, 8))
    masked = load_tokenizer(tokenizer).mask_token_id
    assert 0.3 < float((batch["labels"] != -100).float().mean()) < 0.7
    assert bool((batch["input_ids"] == masked).any())


def test_instructions_learn_the_answers(tmp_path: Path) -> None:
    tokenizer = str(make_tokenizer(tmp_path / "tokenizer"))
    records = [{"prompt": sentence(i), "completion": " yes"} for i in range(8)]
    files = str(write_lines(tmp_path / "chats.jsonl", records))
    model = {"architecture": "llama", "overrides": LLAMA}
    training = built(model, {"instructions": files, "tokenizer": tokenizer})
    assert training.collate is not None
    batch = training.collate(samples(training.dataset, 4))
    learned = batch["labels"] != -100
    assert (batch["labels"][learned] == batch["input_ids"][learned]).all()
    assert 0 < int(learned.sum()) < int(batch["attention_mask"].sum()) / 2


@pytest.mark.parametrize("channels", [1, 3])
def test_images_become_pixel_values(tmp_path: Path, channels: int) -> None:
    shape = (4, 16, 16) if channels == 1 else (4, 16, 16, 3)
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=pixels, labels=np.arange(4))
    model = vit(image_size=16, num_channels=channels, num_labels=4)
    arrays = built(model, {"images": str(tmp_path / "images.npz")})
    assert arrays.collate is None
    assert arrays.dataset[2]["pixel_values"].shape == (channels, 16, 16)

    from datasets import ClassLabel, Dataset, Features, Image
    from PIL import Image as LiveFrame

    features = Features({"image": Image(), "label": ClassLabel(num_classes=4)})
    rows = {"image": [LiveFrame.fromarray(image).resize((40, 20)) for image in pixels], "label": [0, 1, 2, 3]}
    Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "set"))
    sample = built(model, {"huggingface": str(tmp_path / "set")}).dataset[2]
    assert sample["pixel_values"].shape == (channels, 16, 16)
    assert -1 <= float(sample["pixel_values"].min()) < -0.2 < 0.2 < float(sample["pixel_values"].max()) <= 1
    assert int(sample["labels"]) == 2


def vit(**changes: Any) -> dict[str, Any]:
    few = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {"architecture": "vit", "task": "image-classification", "overrides": few | changes}


def test_images_are_prepared_as_in_the_models_directory(tmp_path: Path) -> None:
    from datasets import Dataset, Features, Image, Value
    from PIL import Image as LiveFrame

    place = Path(saved(tmp_path / "model", "resnet"))
    numbers = {"size": {"shortest_edge": 8}, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.5, 0.25]}
    (place / "preprocessor_config.json").write_text(json.dumps(numbers))
    features = Features({"picture": Image(), "label": Value("int64")})
    rows = {"picture": [LiveFrame.new("RGB", (20, 20), (0, 255, 0))], "label": [1]}
    Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "set"))
    model = {"huggingface": str(place), "task": "image-classification"}
    values = built(model, {"huggingface": str(tmp_path / "set")}).dataset[0]["pixel_values"]
    assert values.shape == (3, 8, 8)
    assert values[:, 0, 0].tolist() == pytest.approx([-0.2, 1.6, -1.2])


def test_images_are_cropped_and_not_normalised_where_the_models_directory_says_so(tmp_path: Path) -> None:
    from PIL import Image as LiveFrame

    place = Path(saved(tmp_path / "model", "resnet"))
    numbers = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 8, "width": 12},
        "do_center_crop": True,
        "crop_size": {"height": 4, "width": 6},
        "do_normalize": False,
        "image_mean": [0.1, 0.2, 0.3],
    }
    (place / "preprocessor_config.json").write_text(json.dumps(numbers))
    model = load_model(ModelTable(huggingface=str(place), task="image-classification"), None)
    ramp = np.broadcast_to(np.arange(12, dtype=np.uint8)[None, :, None] * 20, (8, 12, 3))
    values = image_preparation(model)(LiveFrame.fromarray(ramp.copy()))
    assert values.shape == (3, 4, 6)
    assert values[0, 0].tolist() == pytest.approx([n * 20 / 255 for n in range(3, 9)])


@pytest.mark.parametrize("size", [{"shortest_edge": 8}, 8])
@pytest.mark.parametrize("turned", [False, True])
def test_images_that_are_cropped_keep_their_ratio_where_the_size_is_that_of_the_shorter_edge(
    tmp_path: Path, size: Any, turned: bool
) -> None:
    from PIL import Image as LiveFrame

    place = Path(saved(tmp_path / "model", "resnet"))
    numbers = {"size": size, "do_center_crop": True, "crop_size": 6, "do_normalize": False, "resample": 0}
    (place / "preprocessor_config.json").write_text(json.dumps(numbers))
    model = load_model(ModelTable(huggingface=str(place), task="image-classification"), None)
    pixels = np.zeros((16, 48, 3), dtype=np.uint8)
    pixels[:, 18:30] = 255
    values = image_preparation(model)(LiveFrame.fromarray(pixels.swapaxes(0, 1).copy() if turned else pixels))
    assert values.shape == (3, 6, 6) and bool((values == 1).all())


def test_images_are_neither_resized_nor_rescaled_where_the_models_directory_says_so(tmp_path: Path) -> None:
    from PIL import Image as LiveFrame

    place = Path(saved(tmp_path / "model", "resnet"))
    kept = {"image_processor_type": "ViTImageProcessor", "do_resize": False, "do_normalize": False}
    numbers = kept | {"do_center_crop": True, "crop_size": 6, "rescale_factor": 0.5}
    (place / "preprocessor_config.json").write_text(json.dumps(numbers))
    model = load_model(ModelTable(huggingface=str(place), task="image-classification"), None)
    values = image_preparation(model)(LiveFrame.new("RGB", (20, 20), (0, 100, 200)))
    assert values.shape == (3, 6, 6)
    assert values[:, 0, 0].tolist() == pytest.approx([0, 50, 100])


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        (
            {"size": {"shortest_edge": 8}},
            "unequal shapes: give size a height and a width, or set do_center_crop",
        ),
        ({"size": {"height": "tall"}}, "cannot be prepared as .*preprocessor_config.json says"),
        ({"image_processor_type": "Unknown"}, "cannot be prepared as .*preprocessor_config.json says"),
    ],
)
def test_a_preparation_of_images_that_cannot_be_used_is_rejected(
    tmp_path: Path, numbers: dict[str, Any], problem: str
) -> None:
    place = Path(saved(tmp_path / "model", "resnet"))
    kind = {"image_processor_type": "CLIPImageProcessor", "do_center_crop": False}
    (place / "preprocessor_config.json").write_text(json.dumps(kind | numbers))
    model = load_model(ModelTable(huggingface=str(place), task="image-classification"), None)
    with pytest.raises(DataError, match=problem):
        image_preparation(model)


def test_columns_of_a_saved_data_set_are_those_that_the_model_takes(tmp_path: Path) -> None:
    tokenizer = str(make_tokenizer(tmp_path / "tokenizer"))
    model = {
        "architecture": "bert",
        "task": "sequence-classification",
        "overrides": sizes("bert") | {"num_labels": 3},
    }
    training = built(model, {"huggingface": classified(tmp_path), "tokenizer": tokenizer})
    assert training.collate is not None
    batch = training.collate(samples(training.dataset, 3))
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    assert batch["labels"].tolist() == [0, 2, 1]
    assert batch["input_ids"].shape == (3, 8)


def test_a_saved_data_set_of_tokens_learns_the_next_one(tmp_path: Path) -> None:
    place = dataset_of(tmp_path / "ids", {"input_ids": [[1, 2, 3], [4, 5, 6]]})
    training = built(from_sizes(pad_token_id=0), {"huggingface": place})
    assert training.collate is not None
    batch = training.collate(samples(training.dataset, 2))
    assert batch["labels"].tolist() == [[1, 2, 3, *[-100] * 5], [4, 5, 6, *[-100] * 5]]


@pytest.mark.parametrize(
    ("columns", "model", "says"),
    [
        ({"input_ids": [[1]]}, {"architecture": "t5"}, r"no labels: its columns are input_ids"),
        ({"text": ["a"]}, from_sizes(), r"no labels"),
        (
            {"text": ["a"], "labels": [1]},
            from_sizes(),
            r"no column that the model takes: it has text, labels",
        ),
        ({"input_ids": [[1, 2]]}, from_sizes(), r"no token to pad with"),
    ],
)
def test_a_saved_data_set_that_does_not_fit_is_rejected(
    tmp_path: Path, columns: dict[str, list[Any]], model: dict[str, Any], says: str
) -> None:
    with pytest.raises(TrainingError, match=says):
        built(model, {"huggingface": dataset_of(tmp_path / "set", columns)})


def test_a_class_that_the_model_does_not_have_is_named_with_its_sample(tmp_path: Path) -> None:
    np.savez(tmp_path / "images.npz", images=np.zeros((3, 16, 16), np.uint8), labels=np.array([0, 1, 7]))
    model = vit(image_size=16, num_channels=1, num_labels=2)
    dataset = built(model, {"images": str(tmp_path / "images.npz")}).dataset
    assert int(dataset[1]["labels"]) == 1
    with pytest.raises(
        ValueError, match=r"sample 2: the label 7 is not one of the model's 2 classes.*num_labels"
    ):
        dataset[2]


def test_a_host_with_other_files_is_rejected(tmp_path: Path, text: str) -> None:
    tokenizer = str(make_tokenizer(tmp_path / "tokenizer"))
    model = {"architecture": "llama", "overrides": LLAMA}
    tables = {"model": model, "data": {"text": f"{tmp_path}/*.jsonl", "tokenizer": tokenizer}, "steps": 9}
    facts = count_files(msgspec.convert(tables, Recipe))
    assert facts["data.text"] == FileTotals(files=1, bytes=Path(text).stat().st_size)
    assert facts["data.tokenizer"].files == 1
    files = msgspec.to_builtins(facts)
    assert len(build(**tables, files=files).dataset) > 0
    write_lines(tmp_path / "more.jsonl", [{"text": "more"}])
    with pytest.raises(
        TrainingError, match=r"data\.text: the job was submitted with 1 files.*this host has 2"
    ):
        build(**tables, files=files)
    with pytest.raises(TrainingError, match=r"data\.tokens: .* this host has none"):
        build(**tables, files={"data.tokens": {"files": 1, "bytes": 2}})
    with pytest.raises(TrainingError, match=r"this host lacks files of the job.*gone.*to every node"):
        build(**tables | {"data": {"tokens": f"{tmp_path}/gone.bin"}}, files=files)


def test_a_share_of_the_samples_is_held_out(tokens: str) -> None:
    evaluation = {"every_steps": 5, "fraction": 0.25}
    training = built(from_sizes(), {"tokens": tokens, "length": 16}, evaluation=evaluation)
    assert (len(training.dataset), len(training.evaluation)) == (96, 32)
    with pytest.raises(TrainingError, match=r"a share of 0\.001 of 128 samples is no sample"):
        built(
            from_sizes(), {"tokens": tokens, "length": 16}, evaluation={"every_steps": 5, "fraction": 0.001}
        )


def test_an_evaluation_may_have_data_of_its_own(tokens: str) -> None:
    evaluation = {"every_steps": 5, "data": {"tokens": tokens, "length": 32}}
    training = built(from_sizes(), {"tokens": tokens}, evaluation=evaluation)
    assert (len(training.dataset), len(training.evaluation)) == (32, 64)


def test_held_out_samples_of_unequal_lengths_are_padded_where_those_of_training_are_packed(
    text: str, tmp_path: Path
) -> None:
    tokenizer = str(make_tokenizer(tmp_path / "tokenizer"))
    data = {"text": text, "tokenizer": tokenizer, "length": 16}
    evaluation = {"every_steps": 5, "data": data | {"packing": False, "length": 64}}
    training = built({"architecture": "llama", "overrides": LLAMA}, data, evaluation=evaluation)
    held_out = samples(training.evaluation, 4)
    assert len({len(sample["input_ids"]) for sample in held_out}) > 1
    assert training.collate is not None
    assert len(training.collate(held_out)["input_ids"]) == 4


@pytest.mark.parametrize(("total", "count"), [(2, 1), (10, 3), (10, 5), (101, 1), (1000, 499), (1000, 7)])
def test_held_out_samples_are_spaced_evenly_and_never_trained_on(total: int, count: int) -> None:
    whole: Sequence[int] = range(total)
    held, trained = Split(whole, count, held_out=True), Split(whole, count, held_out=False)
    taken = samples(held, len(held))
    assert (len(held), len(trained)) == (count, total - count)
    assert sorted([*taken, *samples(trained, len(trained))]) == list(whole)
    gaps = np.diff([-(total / count / 2), *taken])
    assert all(abs(gap - total / count) <= 1.5 for gap in gaps)
    with pytest.raises(IndexError):
        trained[total - count]


def test_the_byte_tokenizer_has_one_token_per_byte() -> None:
    loaded = load_tokenizer(byte_tokenizer())
    written = "déjà vu\n\t\x00 ∀x"
    assert loaded.tokenizer.encode(written).ids == list(written.encode())
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(written).ids) == written
    assert (loaded.vocabulary_size, loaded.end_of_text_id, loaded.pad_token_id, loaded.mask_token_id) == (
        259,
        256,
        257,
        258,
    )


# --- the optimizer and the schedule ------------------------------------------------------------------


def parameters() -> list[tuple[str, nn.Parameter]]:
    return [("weight", nn.Parameter(torch.ones(3, 2))), ("bias", nn.Parameter(torch.ones(3)))]


@pytest.mark.parametrize(
    ("table", "kind", "decays"),
    [
        ({}, torch.optim.AdamW, [0.1, 0.0]),
        ({"weight_decay": 0.3, "decay_all": True}, torch.optim.AdamW, [0.3]),
        ({"name": "adam"}, torch.optim.Adam, [0.0, 0.0]),
        ({"name": "sgd", "weight_decay": 0.5, "fused": False}, torch.optim.SGD, [0.5, 0.0]),
        ({"name": "adafactor"}, torch.optim.Adafactor, [0.0, 0.0]),
    ],
)
def test_weights_decay_and_norms_do_not(table: dict[str, Any], kind: type, decays: list[float]) -> None:
    optimizer = make_optimizer(OptimizerTable(**table, learning_rate=0.25))(parameters())
    assert type(optimizer) is kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == decays
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}
    if kind is not torch.optim.Adafactor:
        assert optimizer.param_groups[0]["fused"] is table.get("fused", True)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_options_reach_the_optimizer() -> None:
    adam = make_optimizer(OptimizerTable(betas=(0.5, 0.6), eps=1e-3))(parameters())
    assert (adam.defaults["betas"], adam.defaults["eps"]) == ((0.5, 0.6), 1e-3)
    sgd = make_optimizer(OptimizerTable(name="sgd", momentum=0.25))(parameters())
    assert sgd.defaults["momentum"] == 0.25


def test_the_rate_rises_then_falls_to_the_final_share() -> None:
    factor = schedule_factor(ScheduleTable(warmup_steps=4, final_ratio=0.2), 24)
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(13) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    assert factor(23) == pytest.approx(0.2)
    assert factor(50) == pytest.approx(0.2)
    falling = [factor(step) for step in range(3, 24)]
    assert falling == sorted(falling, reverse=True)


def test_the_courses_differ_after_the_warm_up() -> None:
    linear = schedule_factor(ScheduleTable(name="linear", warmup_steps=0, final_ratio=0.0), 10)
    assert [linear(step) for step in range(10)] == pytest.approx([0.1 * n for n in range(9, -1, -1)])
    constant = schedule_factor(ScheduleTable(name="constant", warmup_ratio=0.2), 10)
    assert [constant(step) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    stable = schedule_factor(ScheduleTable(name="wsd", warmup_steps=2, decay_ratio=0.4), 10)
    assert [stable(step) for step in range(10)] == pytest.approx(
        [0.5, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1]
    )


def test_a_warm_up_may_be_longer_than_the_job() -> None:
    factor = schedule_factor(ScheduleTable(warmup_steps=100), 10)
    assert [factor(step) for step in (0, 9)] == [0.01, 0.1]


def test_the_schedule_steps_the_optimizer() -> None:
    optimizer = make_optimizer(OptimizerTable(learning_rate=1.0))(parameters())
    scheduler = make_scheduler(ScheduleTable(), 100)(optimizer)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[-1] == pytest.approx(0.1)
