"""Tests of instructions: the model learns completions and answers, but not prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from runtime.sources.errors import DataError
from runtime.sources.instructions import InstructionDataset
from tests.helpers.corpus import END_OF_TEXT, make_tokenizer, sentence, write_lines

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return str(directory)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def instructions(tmp_path: Path, tokenizer: str, *records: Any, length: int = 512) -> InstructionDataset:
    return InstructionDataset(
        str(write_lines(tmp_path / "instructions.jsonl", records)), tokenizer, length=length
    )


def parts(tokenizer: str, sample: dict[str, Any]) -> tuple[str, str]:
    """Return the whole text of a sample, and the learned part of it."""
    reader = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    learned = [label for label in labels if label != -100]
    return reader.decode(ids, skip_special_tokens=False), reader.decode(learned, skip_special_tokens=False)


def test_completions_are_learned(tmp_path: Path, tokenizer: str) -> None:
    records = [{"prompt": sentence(n) + "\n", "completion": sentence(n + 50), "id": n} for n in range(20)]
    dataset = instructions(tmp_path, tokenizer, *records, {"prompt": "", "completion": "only"})
    assert len(dataset) == 21
    for number, record in enumerate(records):
        completion = record["completion"] + END_OF_TEXT
        assert parts(tokenizer, dataset[number]) == (record["prompt"] + completion, completion)
    assert parts(tokenizer, dataset[20]) == ("only" + END_OF_TEXT,) * 2


def test_text_of_several_bytes_is_learned_whole(tmp_path: Path, tokenizer: str) -> None:
    dataset = instructions(tmp_path, tokenizer, {"prompt": "é→🦊", "completion": "🦊→é ok"})
    assert parts(tokenizer, dataset[0])[1] == "🦊→é ok" + END_OF_TEXT


def test_answers_of_conversations_are_learned(tmp_path: Path, tokenizer: str) -> None:
    roles = ["system", "user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": sentence(n)} for n, role in enumerate(roles)]
    dataset = instructions(tmp_path, tokenizer, {"messages": messages}, {"prompt": "a", "completion": " b"})
    text, learned = parts(tokenizer, dataset[0])
    assert text == "".join(f"<|{m['role']}|>{m['content']}{END_OF_TEXT}" for m in messages)
    assert learned == sentence(2) + END_OF_TEXT + sentence(4) + END_OF_TEXT
    assert parts(tokenizer, dataset[1]) == ("a b" + END_OF_TEXT, " b" + END_OF_TEXT)


def test_samples_are_cut_and_left_out_if_nothing_is_learned(tmp_path: Path, tokenizer: str) -> None:
    long, short = sentence(1, words=40), "a"
    dataset = instructions(
        tmp_path,
        tokenizer,
        {"prompt": long, "completion": short},
        {"prompt": short, "completion": long},
        length=20,
    )
    assert len(dataset) == 1, "the prompt of the other record fills a sample alone"
    assert len(dataset[0]["input_ids"]) == 20
    text, learned = parts(tokenizer, dataset[0])
    assert (short + long).startswith(text) and text == short + learned
    with pytest.raises(DataError, match="none of the 1 documents has a token to learn from; take a larger"):
        instructions(tmp_path, tokenizer, {"prompt": long, "completion": short}, length=20)


def test_instructions_of_parquet_files(tmp_path: Path, tokenizer: str) -> None:
    import pyarrow
    import pyarrow.parquet

    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    table = pyarrow.table({"messages": [messages, messages]})
    pyarrow.parquet.write_table(table, tmp_path / "chat.parquet")
    dataset = InstructionDataset(str(tmp_path / "chat.parquet"), tokenizer, length=64)
    assert [parts(tokenizer, sample)[1] for sample in dataset] == ["a" + END_OF_TEXT] * 2
    batch = dataset.pad_collate()([dataset[0], dataset[1]])
    assert batch["input_ids"].shape == batch["labels"].shape


USER = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"text": "a"}, r'line 2: an instruction has "prompt" and "completion", or "messages"; .*"text"'),
        ({"prompt": "a"}, r'line 2: there is no field "completion"'),
        ({"prompt": "a", "completion": 3}, r'line 2: the field "completion" must be a string, not a int'),
        ({"messages": []}, r'line 2: "messages" must be a list with at least one message'),
        (
            {"messages": ["hello"]},
            r'line 2: message 1 must be an object with "role" and "content", not "hello"',
        ),
        ({"messages": [USER]}, "line 2: no message has the role assistant"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "line 2: a conversation cannot begin with"),
    ],
)
def test_records_that_are_no_instructions(tmp_path: Path, tokenizer: str, record: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        instructions(tmp_path, tokenizer, {"prompt": "a", "completion": "b"}, record)


def chat_tokenizer(tmp_path: Path, template: str | None) -> str:
    directory = make_tokenizer(tmp_path / "chat")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "has no chat template for conversations; add chat_template.jinja"),
        ("{{ raise_exception('no roles') }}", "line 1: the chat template in .* fails: no roles"),
        ("{{ messages[-1].content }}", "line 1: the chat template in .* writes message 2 in another way"),
    ],
)
def test_chat_templates_that_cannot_be_used(tmp_path: Path, template: str | None, says: str) -> None:
    messages = [USER, {"role": "assistant", "content": "a"}, USER, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match=says):
        instructions(tmp_path, chat_tokenizer(tmp_path, template), {"messages": messages})
