"""Text to tokens and back: SmolLM2's own tokenizer against transformers', streaming, templates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_demo_models import BLANK, byte_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from fusedops.errors import LoadError
from serving_demo.gguf_header import read_header
from serving_demo.loader import default_model_path
from serving_demo.tokenizer import (
    DemoTokenizer,
    render_chat,
    tokenizer_from_folder,
    tokenizer_from_gguf,
)

TEXTS = (
    "",
    "Hello, world!",
    "The capital of France is Paris.",
    "It's they're we'll DON'T",
    "In 1999 there were 2 + 2 = 4 reasons.",
    "def f(x):\n    return x ** 2\n\n\treturn",
    "naïve café, Ærøskøbing, Łódź, ĳ",
    "Привет, как дела? 你好，世界！ こんにちは 안녕하세요",
    "👩‍👩‍👧‍👦 🇩🇰 🏳️‍🌈 e\u0301",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "<|im_start|assistant <file_sep>x<file_sep>",
    "trailing blanks   ",
    "\r\nWindows\r\nlines\x00\x07",
)


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    try:
        return read_header(default_model_path()).metadata
    except LoadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smollm(metadata: dict[str, Any]) -> DemoTokenizer:
    return tokenizer_from_gguf(metadata, "the default model")


@pytest.fixture(scope="module")
def reference(metadata: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    path = default_model_path()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_ids_equal_transformers(smollm: DemoTokenizer, reference: Any) -> None:
    for text in TEXTS:
        assert smollm.encode(text) == reference(text)["input_ids"], text


def test_digits_are_split_as_the_model_was_trained(smollm: DemoTokenizer, reference: Any) -> None:
    """Transformers drops a GGUF file's rule for digits; with it put back, all ids agree."""
    text = "a  1\n\n99  12 ٣٤ x²"
    assert smollm.encode(text) != reference(text)["input_ids"]
    corrected = Tokenizer.from_str(reference.backend_tokenizer.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    corrected.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for sample in (*TEXTS, text):
        assert smollm.encode(sample) == corrected.encode(sample).ids
    assert smollm.backend.encode("  12").tokens == [2 * BLANK, "1", "2"]


def test_texts_come_back(smollm: DemoTokenizer, reference: Any) -> None:
    for text in TEXTS:
        ids = smollm.encode(text)
        assert smollm.backend.decode(ids, skip_special_tokens=False) == text
        assert smollm.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_chats_equal_transformers(smollm: DemoTokenizer, reference: Any) -> None:
    chats = (
        [{"role": "user", "content": "Why is the sky blue?"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi {{ name }} <b>"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "Bye\n"},
        ],
    )
    for chat in chats:
        expected = reference.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        assert smollm.encode_chat(chat) == expected


# Streaming


def pieces(tokenizer: DemoTokenizer, ids: list[int]) -> list[str]:
    """What a stream returns for each token."""
    stream = tokenizer.stream()
    return [stream.push(token) for token in ids]


def test_a_stream_never_shows_a_broken_character(smollm: DemoTokenizer) -> None:
    for text in TEXTS:
        ids = smollm.encode(text)
        shown = pieces(smollm, ids)
        assert "".join(shown) == smollm.decode(ids)
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in shown)
    emoji = smollm.encode("👩‍👩‍👧‍👦")
    assert len(emoji) > 4
    assert "" in pieces(smollm, emoji)


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=30))
def test_any_text_streams_whole(text: str) -> None:
    tokenizer = every_byte_tokenizer()
    text = text.replace("\N{REPLACEMENT CHARACTER}", "")
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert "".join(pieces(tokenizer, ids)) == text


def every_byte_tokenizer() -> DemoTokenizer:
    """One token a byte, so that every character beyond ASCII is split."""
    from tokenizers import decoders

    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return DemoTokenizer(backend, None, {})


def test_a_text_that_breaks_off_inside_a_character() -> None:
    tokenizer = every_byte_tokenizer()
    assert "".join(pieces(tokenizer, tokenizer.encode("ok €")[:-1])) == "ok "


def test_a_stray_byte_is_shown_as_such_and_the_text_goes_on() -> None:
    tokenizer = every_byte_tokenizer()
    ids = [*tokenizer.encode("a"), tokenizer.encode("€")[1], *tokenizer.encode("b c")]
    assert "".join(pieces(tokenizer, ids)) == "a\N{REPLACEMENT CHARACTER}b c"


# GGUF fields


def fields(**changes: Any) -> dict[str, Any]:
    """The tokenizer fields of a small GGUF file."""
    tokens = ["<s>", "</s>", "a", "b", "ab", BLANK, "1", "2", "12", "<think>"]
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "default",
        "tokens": tokens,
        "token_type": [3, 3, 1, 1, 1, 1, 1, 1, 1, 4],
        "merges": ["a b", "1 2"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}


def tokens_of(values: dict[str, Any], text: str) -> list[str]:
    """The tokens that such a file's tokenizer makes of a text."""
    return tokenizer_from_gguf(values, "file").backend.encode(text).tokens


def test_the_pre_tokenizer_named_in_the_file_is_used() -> None:
    assert tokens_of(fields(pre="default"), "ab 12") == ["ab", BLANK, "12"]
    assert tokens_of(fields(pre="smollm"), "ab 12") == ["ab", BLANK, "1", "2"]
    assert tokens_of(fields(pre="llama-bpe"), "ab12") == ["ab", "12"]
    assert tokens_of(fields(pre=None), "ab 12") == ["ab", BLANK, "12"]


def test_a_word_of_llama3s_vocabulary_is_taken_whole() -> None:
    unmerged = fields(tokens=["<s>", "</s>", "a", "b", "bab"], token_type=None, merges=["b a"])
    unmerged["tokenizer.ggml.tokens"].append("ba")
    assert tokens_of({**unmerged, "tokenizer.ggml.pre": "llama-bpe"}, "bab") == ["bab"]
    assert tokens_of({**unmerged, "tokenizer.ggml.pre": "gpt-2"}, "bab") == ["ba", "b"]


def test_control_and_user_tokens_are_matched_whole() -> None:
    tokenizer = tokenizer_from_gguf(fields(), "file")
    ids = tokenizer.encode("<s>ab<think></s>")
    assert ids == [0, 4, 9, 1]
    assert tokenizer.decode(ids) == "ab<think>"


def test_a_bos_token_is_added_where_the_file_says_so() -> None:
    assert tokenizer_from_gguf(fields(add_bos_token=True), "file").encode("ab") == [0, 4]
    assert tokenizer_from_gguf(fields(add_bos_token=False), "file").encode("ab") == [4]
    chat = tokenizer_from_gguf(
        fields(add_bos_token=True)
        | {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}"},
        "file",
    )
    assert chat.encode_chat([{"role": "user", "content": "ab"}]) == [0, 4]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "llama"}, "'llama' is not supported; accepted is 'gpt2'"),
        ({"model": None}, "None is not supported"),
        ({"pre": "qwen2"}, "'qwen2' is not supported; accepted are default"),
        ({"tokens": None}, "'tokenizer.ggml.tokens' is missing"),
        ({"merges": None}, "'tokenizer.ggml.merges' is missing"),
        ({"merges": ["a x"]}, "merges do not fit"),
        ({"merges": ["a"]}, "merges do not fit"),
        ({"token_type": [1]}, "differ in length"),
    ],
)
def test_fields_that_cannot_be_used(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words) as caught:
        tokenizer_from_gguf(fields(**changes), "file")
    assert str(caught.value).startswith("file: ")


# Templates and folders


def test_a_model_without_a_template_takes_plain_text() -> None:
    tokenizer = tokenizer_from_gguf(fields(add_bos_token=True), "file")
    assert tokenizer.encode_chat([{"role": "user", "content": "ab"}]) == [0, 4]


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only users may speak') }}",
        "{% for %}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ nothing.at.all }}",
    ],
)
def test_a_template_that_cannot_be_rendered(template: str) -> None:
    with pytest.raises(LoadError, match="chat template cannot be rendered"):
        render_chat(template, [{"role": "user", "content": "x"}], {})


def test_what_a_template_may_use() -> None:
    template = (
        "{%- for m in messages %}{% if loop.index0 > 0 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}{{ eos_token }}{{ strftime_now('%Y') | length }}\n"
        "{%- endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    messages = [{"role": "user", "content": "é"}] * 2
    rendered = render_chat(template, messages, {"eos_token": "</s>"})
    assert rendered == '{"role": "user", "content": "é"}</s>4>'


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_folders_template_and_special_tokens(folder: Path) -> None:
    settings: dict[str, Any] = {
        "bos_token": {"content": "<bos>", "lstrip": False},
        "eos_token": "<eos>",
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    chat = [{"role": "user", "content": "x"}]
    x = byte_tokenizer().token_to_id("x")
    assert tokenizer_from_folder(folder).encode_chat(chat) == [1, x, 2]
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "x{{''}}x"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert tokenizer_from_folder(folder).encode_chat(chat) == [x, x]
    (folder / "chat_template.jinja").write_text("xxx")
    assert tokenizer_from_folder(folder).encode_chat(chat) == [x, x, x]


def test_a_folder_without_settings(folder: Path) -> None:
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.chat_template is None
    assert tokenizer.decode(tokenizer.encode("plain text")) == "plain text"
