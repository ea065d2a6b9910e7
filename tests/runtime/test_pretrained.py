"""Tests of pretrained weights: tensors of a hub snapshot, read by name into the parameters that request them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from runtime.errors import TrainingError
from runtime.pretrained import PretrainedWeights
from tests.helpers.small_models import MODELS, config_of, lasting, load_into, logits_of, model_of


def on_meta(kind: str, auto: Any = None, **options: Any) -> Any:
    with torch.device("meta"):
        return (auto or MODELS[kind][0]).from_config(config_of(kind, **options))


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_gets_every_value_that_was_saved(tmp_path: Path, kind: str, tied: bool) -> None:
    saved, model = model_of(kind, tied=tied), model_of(kind, tied=tied, seed=1)
    saved.save_pretrained(tmp_path, max_shard_size="30KB" if tied else "5GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (tied and kind != "resnet")
    weights = PretrainedWeights(tmp_path, on_meta(kind, tied=tied))
    assert weights.initialised == weights.unexpected == ()
    weights.load_into(lasting(model))
    assert same(model, saved)
    assert torch.equal(logits_of(model, kind), logits_of(saved, kind))


def test_only_files_with_requested_tensors_are_read(tmp_path: Path) -> None:
    saved, model = model_of("llama"), model_of("llama", seed=1)
    saved.save_pretrained(tmp_path, max_shard_size="30KB")
    weights = PretrainedWeights(tmp_path, model)
    wanted = {name: value for name, value in lasting(model).items() if name.startswith("model.layers.1.")}
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {files[name] for name in wanted}
    for file in set(files.values()) - needed:
        (tmp_path / file).unlink()
    weights.load_into(wanted)
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in wanted.items())
    with pytest.raises(TrainingError, match=r"model\.embed_tokens\.weight cannot be read"):
        weights.load_into({"model.embed_tokens.weight": model.model.embed_tokens.weight})


def test_a_tied_tensor_is_found_under_any_of_its_names(tmp_path: Path) -> None:
    saved, model = model_of("gpt2"), model_of("gpt2", seed=1)
    saved.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    table = state.pop("transformer.wte.weight")
    save_file(state | {"lm_head.weight": table}, tmp_path / "model.safetensors")
    load_into({"lm_head.weight": model.lm_head.weight}, tmp_path, model)
    assert torch.equal(model.transformer.wte.weight, table)
    other = table + 1
    save_file(
        state | {"lm_head.weight": other, "transformer.wte.weight": table}, tmp_path / "model.safetensors"
    )
    weights = PretrainedWeights(tmp_path, model)
    with pytest.raises(TrainingError, match="one tied tensor in the model and differ"):
        weights.load_into(lasting(model))


def test_a_base_model_s_prefix_may_be_missing_or_there(tmp_path: Path) -> None:
    saved, model = model_of("bert"), model_of("bert", seed=1)
    saved.bert.save_pretrained(tmp_path / "base")
    weights = load_into(lasting(model), tmp_path / "base", model, new=["cls.*"])
    assert same(model.bert, saved.bert)
    assert {name.partition(".")[0] for name in weights.initialised} == {"cls"}
    saved.save_pretrained(tmp_path / "whole")
    base = model_of("bert", seed=2, auto=AutoModel)
    weights = load_into(lasting(base), tmp_path / "whole", base, new=["pooler.*"])
    assert {name.partition(".")[0] for name in weights.unexpected} == {"cls"}
    assert torch.equal(
        base.encoder.layer[1].output.dense.weight, saved.bert.encoder.layer[1].output.dense.weight
    )


def test_values_are_converted_to_the_parameters_types(tmp_path: Path) -> None:
    saved, model = model_of("llama"), model_of("llama", seed=1).double()
    saved.bfloat16().save_pretrained(tmp_path)
    load_into(lasting(model), tmp_path, on_meta("llama"))
    wanted = saved.state_dict()
    assert all(torch.equal(value, wanted[name].double()) for name, value in lasting(model).items())


def test_the_base_of_an_adapted_model_is_read_and_the_adapter_stays(tmp_path: Path) -> None:
    saved = model_of("llama")
    saved.save_pretrained(tmp_path)
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], r=4)
    model = get_peft_model(model_of("llama", tied=False, seed=1), lora)
    state = load_file(tmp_path / "model.safetensors")
    save_file(
        state | {"lm_head.weight": state["model.embed_tokens.weight"] + 1}, tmp_path / "model.safetensors"
    )
    added = {name: value.clone() for name, value in lasting(model).items() if "lora_" in name}
    load_into(lasting(model), tmp_path, model)
    now = lasting(model)
    prefix = "base_model.model.model.layers.0.self_attn"
    assert torch.equal(
        now[f"{prefix}.q_proj.base_layer.weight"], state["model.layers.0.self_attn.q_proj.weight"]
    )
    assert torch.equal(now[f"{prefix}.k_proj.weight"], state["model.layers.0.self_attn.k_proj.weight"])
    for copy in ("original_module", "modules_to_save.default"):
        assert torch.equal(
            now[f"base_model.model.lm_head.{copy}.weight"], state["model.embed_tokens.weight"] + 1
        )
    assert len(added) == 8 and all(torch.equal(now[name], value) for name, value in added.items())


def test_everything_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    del state["model.norm.weight"], state["model.layers.1.mlp.up_proj.weight"]
    state["model.layers.0.input_layernorm.weight"] = torch.zeros(31)
    state["model.layers.0.mlp.up_proj.weight"] = state["model.layers.0.mlp.up_proj.weight"].to(torch.int8)
    state["model.extra"] = torch.zeros(3)
    save_file(state, path)
    with pytest.raises(TrainingError) as raised:
        PretrainedWeights(tmp_path, on_meta("llama"))
    assert str(raised.value) == (
        f"the weights in {tmp_path} do not fit LlamaForCausalLM; "
        "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight; "
        "of another shape: model.layers.0.input_layernorm.weight (31,) instead of (32,); "
        "quantised, which cannot be trained: model.layers.0.mlp.up_proj.weight of int8; "
        "not used: model.extra. Use the configuration that belongs to these weights, or name tensors that "
        "are to begin with fresh values as new"
    )
    with pytest.raises(
        TrainingError, match=r"model\.layers\.\*\.self_attn\.q_proj\.weight \(32, 32\) .* \(2 of"
    ):
        PretrainedWeights(tmp_path, on_meta("llama", hidden_size=48, num_attention_heads=6))


def test_a_new_head_has_another_shape(tmp_path: Path) -> None:
    head = AutoModelForSequenceClassification
    model_of("bert", auto=head, num_labels=2).save_pretrained(tmp_path)
    model = model_of("bert", auto=head, num_labels=5, seed=1)
    with pytest.raises(TrainingError, match=r"classifier\.weight \(2, 32\) instead of \(5, 32\)"):
        PretrainedWeights(tmp_path, model)
    fresh = model.classifier.weight.clone()
    weights = load_into(lasting(model), tmp_path, model, new=["classifier.*"])
    assert weights.initialised == ("classifier.weight", "classifier.bias")
    assert torch.equal(model.classifier.weight, fresh)


def test_a_plain_module_is_filled_by_its_own_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    wanted = {name: torch.full_like(value, 3) for name, value in model.state_dict().items()}
    save_file(wanted, tmp_path / "model.safetensors")
    load_into(lasting(model), tmp_path, model)
    assert all((value == 3).all() for value in model.state_dict().values())
    with pytest.raises(TrainingError, match=r"the model has no parameter or buffer 2\.weight"):
        load_into({"2.weight": torch.zeros(1)}, tmp_path, model)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "has neither model.safetensors nor model.safetensors.index.json; it is empty"),
        ({"pytorch_model.bin": b"x"}, "does not read pickled weights. Convert them once"),
        ({"adapter_model.safetensors": b"x"}, "holds an adapter only"),
        ({"model.safetensors": b"x"}, "model.safetensors cannot be read"),
        ({"model.safetensors.index.json": b"{}"}, "is no index of safetensors files"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "../b"}}'},
            "names '../b', which is not a file",
        ),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "b"}}'}, "b of .* are missing; download"),
    ],
)
def test_an_unusable_directory_is_rejected_with_a_remedy(
    tmp_path: Path, files: dict[str, bytes], words: str
) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(TrainingError, match=words):
        PretrainedWeights(tmp_path, nn.Linear(1, 1))


def test_a_name_on_the_hub_is_no_directory() -> None:
    with pytest.raises(TrainingError, match=re.escape("hf download MODEL --local-dir DIR")):
        PretrainedWeights("meta-llama/nowhere", nn.Linear(1, 1))


def test_eight_bit_floats_are_rejected(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(1, 1).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(TrainingError, match="weight is of F8_E4M3; quantised weights cannot be trained"):
        PretrainedWeights(tmp_path, nn.Linear(1, 1, bias=False))


def test_a_masked_model_s_unused_pooler_is_no_error(tmp_path: Path) -> None:
    saved = model_of("bert", auto=AutoModel)
    saved.save_pretrained(tmp_path)
    model = model_of("bert", auto=AutoModelForMaskedLM, seed=1)
    weights = PretrainedWeights(tmp_path, model, new=["cls.*"])
    assert weights.unexpected == ("pooler.dense.bias", "pooler.dense.weight")
