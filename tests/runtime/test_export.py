"""Checkpoints exported for other tools, read by ``from_pretrained`` and peft."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from torch import nn
from typer.testing import CliRunner

from ftd.cli.main import app
from runtime.data.batches import default_collate
from runtime.description import describe
from runtime.layers.model import Model
from runtime.layers.optimizer import Optimization
from runtime.layers.state import LayerStates
from runtime.training import Training
from storage.checkpoint import CheckpointStore
from storage.description import encode_description
from storage.safetensors_file import FLOATING, convert_dtype
from tests.helpers.exporting import checkpoint_of
from tests.helpers.kept_checkpoints import about
from tests.helpers.runtime_support import data_for
from tests.helpers.small_models import MODELS, config_of, lasting, load_into, logits_of, model_of

TOKENIZER = {"tokenizer.json": "{}", "tokenizer_config.json": '{"a": 1}', "chat_template.jinja": "x"}


def export(url: Path, output: Path, *options: str, code: int = 0) -> Any:
    command = ["checkpoint", "export", str(url), str(output), "--format", "huggingface", "--json", *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == code or result.exception, result.output
    if code:
        return str(result.exception)
    assert result.exception is None, result.exception
    return json.loads(result.output)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", MODELS)
def test_from_pretrained_gives_the_same_logits(tmp_path: Path, kind: str, tied: bool) -> None:
    model = model_of(kind, tied=tied)
    checkpoint_of(model, tmp_path / "kept")
    export(tmp_path / "kept", tmp_path / "out", *(["--max-shard-size", "40KB"] if tied else []))
    loaded, said = MODELS[kind][0].from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values()), said
    assert torch.equal(logits_of(loaded, kind), logits_of(model, kind))
    assert type(loaded) is type(model) and loaded.dtype == torch.float32
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    if tied and kind != "resnet":
        assert len(files) > 1 and files[0].startswith("model-00001-of-")
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == files
        kept = list(dict(model.named_parameters()).values())
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in kept)
    else:
        assert files == ["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


class Samples:
    """The same sequence of tokens again and again."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(3, 15)
        return {"input_ids": ids, "labels": ids}


def written_by_an_engine(model: nn.Module, url: Path) -> None:
    """Cut the model into layers, train them one step, and write what they pack."""
    training = Training(
        model=model,
        dataset=Samples(),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
    )
    cut = Model(training, data_for("unused.py:build", precision="float32"))
    optimization = Optimization(cut)
    states = LayerStates(cut, optimization)
    layers = range(cut.layer_count)
    batch = default_collate([training.dataset[index] for index in range(4)])
    output = cut.forward(0, cut.layer_count, None, step=1, row=0, batch=batch)
    torch.autograd.backward(cut.loss(output, batch, 4)[0])
    optimization.step(layers)
    store = CheckpointStore.at(str(url), create=True)
    draft = store.begin(1)
    store.write_description(draft, encode_description(describe(cut.root_module)))
    files = []
    for layer in layers:
        header, payload = states.pack(layer)
        files.append(store.write_layer(draft, layer, header, [payload.numpy()]))
    store.commit(draft, files, **about())


@pytest.mark.parametrize(
    ("kind", "tied"), [("llama", True), ("llama", False), ("gpt2", True), ("bert", True)]
)
def test_layers_of_a_trained_model_are_put_together_again(tmp_path: Path, kind: str, tied: bool) -> None:
    model = model_of(kind, tied=tied)
    before = logits_of(model, kind)
    written_by_an_engine(model, tmp_path / "kept")
    export(tmp_path / "kept", tmp_path / "out")
    loaded = MODELS[kind][0].from_pretrained(tmp_path / "out")
    assert loaded.config.use_cache is not False
    assert torch.equal(logits_of(loaded, kind), logits_of(model, kind))
    assert not torch.equal(logits_of(loaded, kind), before)


@pytest.mark.parametrize("wrapped", [True, False], ids=["get_peft_model", "add_adapter"])
def test_a_trained_adapter_is_exported_and_merged(tmp_path: Path, wrapped: bool) -> None:
    model_of("llama").save_pretrained(tmp_path / "base")
    model = MODELS["llama"][0].from_pretrained(tmp_path / "base")
    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    if wrapped:
        model = get_peft_model(model, config)
    else:
        model.add_adapter(config)
    written_by_an_engine(model, tmp_path / "kept")
    export(tmp_path / "kept", tmp_path / "adapter")
    base = MODELS["llama"][0].from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(logits_of(loaded, "llama"), logits_of(model, "llama"))
    export(tmp_path / "kept", tmp_path / "merged", "--merge")
    merged = MODELS["llama"][0].from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits_of(merged, "llama"), logits_of(model, "llama"), atol=1e-5)


def test_what_was_exported_is_what_ftd_begins_from(tmp_path: Path) -> None:
    model, other = model_of("mixtral"), model_of("mixtral", seed=1)
    checkpoint_of(model, tmp_path / "kept")
    export(tmp_path / "kept", tmp_path / "out")
    load_into(lasting(other), tmp_path / "out", other)
    assert torch.equal(logits_of(other, "mixtral"), logits_of(model, "mixtral"))


def test_a_weight_that_the_architecture_does_not_tie_is_written_under_all_of_its_names(
    tmp_path: Path,
) -> None:
    model = model_of("llama", tied=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    checkpoint_of(model, tmp_path / "kept")
    export(tmp_path / "kept", tmp_path / "out")
    loaded = MODELS["llama"][0].from_pretrained(tmp_path / "out")
    assert torch.equal(logits_of(loaded, "llama"), logits_of(model, "llama"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_converted_as_torch_does_and_the_configuration_says_so(
    tmp_path: Path, dtype: str
) -> None:
    model = model_of("gpt2")
    checkpoint_of(model, tmp_path / "kept")
    export(tmp_path / "kept", tmp_path / "out", "--dtype", dtype)
    loaded = MODELS["gpt2"][0].from_pretrained(tmp_path / "out")
    assert loaded.dtype == getattr(torch, dtype)
    wanted = model.to(loaded.dtype).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in loaded.state_dict().items())


def test_files_of_the_tokenizer_come_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    model_of("llama").save_pretrained(source)
    for name, text in TOKENIZER.items():
        (source / name).write_text(text)
    model = MODELS["llama"][0].from_pretrained(source)
    checkpoint_of(model, tmp_path / "kept")
    export(tmp_path / "kept", tmp_path / "out")
    for name, text in TOKENIZER.items():
        assert (tmp_path / "out" / name).read_text() == text
    assert (tmp_path / "out" / "generation_config.json").is_file()
    elsewhere = model_of("llama")
    description = describe(elsewhere, [source])
    assert set(TOKENIZER) < set(description.files) and description.architecture == "LlamaForCausalLM"


def test_files_that_are_too_large_are_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in TOKENIZER.items():
        (tmp_path / name).write_text(text if name != "tokenizer.json" else "x" * 100_000)
    monkeypatch.setattr("runtime.description.MAX_FILES_BYTES", 50_000)
    description = describe(model_of("llama"), [tmp_path])
    assert description.left_out == ("tokenizer.json",) and "chat_template.jinja" in description.files


def lora(tmp_path: Path) -> Any:
    model_of("llama").save_pretrained(tmp_path / "base")
    base = MODELS["llama"][0].from_pretrained(tmp_path / "base")
    config = LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["norm"], r=4, lora_alpha=16)
    model = get_peft_model(base, config)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.2)
    return model.eval()


def test_an_adapter_is_exported_for_peft_and_merged(tmp_path: Path) -> None:
    model = lora(tmp_path)
    checkpoint_of(model, tmp_path / "kept")
    said = export(tmp_path / "kept", tmp_path / "adapter")
    assert said["tensors"] == 2 * 2 * 2 + 5  # Two matrices for each of two modules in two blocks; five norms.
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    loaded = PeftModel.from_pretrained(
        MODELS["llama"][0].from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    assert torch.equal(logits_of(loaded, "llama"), logits_of(model, "llama"))
    model.save_pretrained(tmp_path / "peft")
    with (
        safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as ours,
        safe_open(tmp_path / "peft" / "adapter_model.safetensors", "pt") as theirs,
    ):
        assert sorted(ours.keys()) == sorted(theirs.keys())
    (tmp_path / "base").rename(tmp_path / "moved")  # The checkpoint has all that is needed.
    said = export(tmp_path / "kept", tmp_path / "merged", "--merge")
    with safe_open(tmp_path / "merged" / "model.safetensors", "pt") as written:
        assert said["tensors"] == len(written.keys())
    merged = MODELS["llama"][0].from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits_of(merged, "llama"), logits_of(model, "llama"), atol=1e-5)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_files_from_an_adapters_directory_make_no_adapter_of_a_whole_model(tmp_path: Path) -> None:
    model = model_of("llama")
    checkpoint_of(model, tmp_path / "kept")
    (tmp_path / "files").mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "nowhere", "target_modules": ["q_proj"]}
    for name, text in {"adapter_config.json": json.dumps(adapter), **TOKENIZER}.items():
        (tmp_path / "files" / name).write_text(text)
    export(tmp_path / "kept", tmp_path / "out", "--files-from", str(tmp_path / "files"))
    assert set(TOKENIZER) < {path.name for path in (tmp_path / "out").iterdir()}
    loaded = MODELS["llama"][0].from_pretrained(tmp_path / "out")
    assert torch.equal(logits_of(loaded, "llama"), logits_of(model, "llama"))


def test_a_configuration_for_a_merged_model_names_the_type_of_its_weights(tmp_path: Path) -> None:
    model = lora(tmp_path)
    checkpoint_of(model, tmp_path / "kept")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "config.json").write_text(
        json.dumps(config | {"dtype": "float16", "max_position_embeddings": 77})
    )
    export(tmp_path / "kept", tmp_path / "merged", "--merge", "--files-from", str(tmp_path / "files"))
    written = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (written["dtype"], written["max_position_embeddings"]) == ("float32", 77)
    assert MODELS["llama"][0].from_pretrained(tmp_path / "merged").dtype == torch.float32


def test_an_adapter_that_transformers_itself_added_is_exported(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path / "base")
    model = MODELS["llama"][0].from_pretrained(tmp_path / "base")
    model.add_adapter(LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False))
    checkpoint_of(model, tmp_path / "kept")
    export(tmp_path / "kept", tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(
        MODELS["llama"][0].from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    assert torch.equal(logits_of(loaded, "llama"), logits_of(model, "llama"))


def test_a_model_without_a_configuration_needs_one(tmp_path: Path) -> None:
    model = model_of("llama")
    checkpoint_of(nn.Sequential(nn.Linear(2, 2)), tmp_path / "plain", layers=1)
    assert "has no config.json: its job was not given a Hugging Face model" in export(
        tmp_path / "plain", tmp_path / "out", code=1
    )
    assert "has no adapter" in export(tmp_path / "plain", tmp_path / "out", "--merge", code=2)
    assert not (tmp_path / "out").exists()

    class Wrapped(nn.Module):
        """A model that is no ``PreTrainedModel`` and has its names."""

        def __init__(self) -> None:
            super().__init__()
            self.model, self.lm_head = model.model, model.lm_head

    checkpoint_of(Wrapped(), tmp_path / "kept")
    config_of("llama").save_pretrained(tmp_path / "configuration")
    (tmp_path / "configuration" / "weights.bin").write_text("not taken")
    export(tmp_path / "kept", tmp_path / "out", "--files-from", str(tmp_path / "configuration"))
    assert not (tmp_path / "out" / "weights.bin").exists()
    loaded = MODELS["llama"][0].from_pretrained(tmp_path / "out")
    assert torch.equal(logits_of(loaded, "llama"), logits_of(model, "llama"))


@pytest.mark.parametrize("source", FLOATING)
@pytest.mark.parametrize("target", FLOATING)
def test_numbers_are_rounded_as_torch_rounds_them(source: str, target: str) -> None:
    torch.manual_seed(0)
    values = torch.cat(
        [
            torch.randn(1000, dtype=torch.float64) * 10.0 ** torch.randint(-9, 9, (1000,)),
            torch.tensor(
                [0.0, -0.0, 1e-40, 1e300, -1e300, float("inf"), -float("inf"), float("nan"), 65520.0]
            ),
            (torch.arange(200).to(torch.int32) * 0x4001 + 0x3F800000).view(torch.float32).double(),
        ]
    ).to(getattr(torch, source))
    wanted = values.to(getattr(torch, target))
    found = convert_dtype(values.view(torch.uint8).numpy(), source, target)
    got = torch.from_numpy(np.ascontiguousarray(found)).view(wanted.dtype)
    assert torch.equal(got.nan_to_num(7), wanted.nan_to_num(7)) and torch.equal(got.isnan(), wanted.isnan())
