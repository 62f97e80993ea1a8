"""Text to token ids and back: from a GGUF file's own fields or a folder's tokenizer.json.

A GGUF file names its pre-tokenizer (``tokenizer.ggml.pre``), the rule that cuts text into words
before byte-pair merging. It is honoured as llama.cpp does and as the model was trained: SmolLM2's
rule splits every digit off. Transformers' reading of a GGUF file knows no rule called ``smollm``
and merges blanks in front of a digit differently when there are two or more; everything else comes
out the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from fusedops.errors import LoadError
from serving_demo.files import read_json

__all__ = [
    "TOKENIZER_FILE",
    "DemoTokenizer",
    "StreamDecoder",
    "tokenizer_from_folder",
    "tokenizer_from_gguf",
]

TOKENIZER_FILE = "tokenizer.json"

_CONTROL, _USER_DEFINED = 3, 4
"""Values of ``tokenizer.ggml.token_type`` that mark a token which is matched whole in the text."""

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _gpt2_words()])


def _llama3_words() -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(_LLAMA3_WORDS), behavior="isolated")
    raw_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([words, raw_bytes])


_PRE_TOKENIZERS = {
    "default": _gpt2_words,
    "gpt-2": _gpt2_words,
    "smollm": _single_digits,
    "llama-bpe": _llama3_words,
    "llama3": _llama3_words,
    "llama-v3": _llama3_words,
}
"""Rules by the names that llama.cpp's converter writes."""

_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3")
"""Rules under which a word that is itself in the vocabulary is taken whole, without merging."""


class DemoTokenizer:
    """A tokenizer and its chat template.

    Args:
        backend: the ``tokenizers`` object that does the work.
        chat_template: Jinja source; None for a base model, whose prompts are plain text.
        special: texts of special tokens that templates name (``bos_token``, ``eos_token``).
    """

    def __init__(
        self, backend: Tokenizer, chat_template: str | None, special: Mapping[str, str]
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self.special = dict(special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain text, with the tokens (BOS) that the model puts around one."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        Args:
            messages: each with ``role`` and ``content``. Without a chat template their contents
                are joined by newlines and encoded as plain text.

        Raises:
            LoadError: the model's template cannot be rendered.
        """
        if self.chat_template is None:
            return self.encode("\n".join(message["content"] for message in messages))
        text = render_chat(self.chat_template, messages, self.special)
        # Templates write BOS themselves, so the tokenizer must not add a second one.
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens; stray bytes show as U+FFFD."""
        return str(self.backend.decode(list(ids), skip_special_tokens=True))

    def stream(self) -> StreamDecoder:
        """A decoder for one text that arrives token by token."""
        return StreamDecoder(self.backend)


class StreamDecoder:
    """Turns tokens into text as they arrive; a character split over tokens comes out once whole."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._stream = decoders.DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        """The text that became complete with this token; empty inside a character.

        A character that the text breaks off in (at its end) is never returned.
        """
        return self._stream.step(self._backend, token_id) or ""


def render_chat(
    template: str, messages: Sequence[Mapping[str, str]], special: Mapping[str, str]
) -> str:
    """Render a chat template (Jinja, sandboxed: it comes out of a model file).

    Raises:
        LoadError: the template is broken or refuses the messages.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(
            messages=[dict(message) for message in messages], add_generation_prompt=True, **special
        )
    except TemplateError as error:
        raise LoadError(f"the model's chat template cannot be rendered: {error}.") from error


def _field(metadata: Mapping[str, Any], name: str, where: str) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        raise LoadError(f"{where}: the field 'tokenizer.ggml.{name}' is missing.")
    return value


def _gguf_backend(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    tokens = _field(metadata, "tokens", where)
    merges = [tuple(merge.split(" ")) for merge in _field(metadata, "merges", where)]
    rule = metadata.get("tokenizer.ggml.pre", "default")
    if rule not in _PRE_TOKENIZERS:
        raise LoadError(
            f"{where}: the pre-tokenizer {rule!r} is not supported; accepted are "
            f"{', '.join(_PRE_TOKENIZERS)}. A Hugging Face folder with a tokenizer.json works."
        )
    try:
        model = models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=rule in _WHOLE_WORDS_FIRST,
        )
    except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
        raise LoadError(
            f"{where}: the tokenizer's merges do not fit its tokens: {error}."
        ) from None
    backend = Tokenizer(model)
    backend.pre_tokenizer = _PRE_TOKENIZERS[rule]()
    backend.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    typed = list(zip(tokens, kinds, strict=True)) if len(kinds) == len(tokens) else None
    if typed is None:
        raise LoadError(f"{where}: 'tokenizer.ggml.token_type' and 'tokens' differ in length.")
    control = [AddedToken(t, normalized=False, special=True) for t, k in typed if k == _CONTROL]
    backend.add_special_tokens(control)
    backend.add_tokens([AddedToken(t, normalized=False) for t, k in typed if k == _USER_DEFINED])
    return backend


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str) -> DemoTokenizer:
    """The tokenizer that a GGUF file's metadata holds (byte-level BPE, ``tokenizer.ggml.*``).

    Raises:
        LoadError: another kind of tokenizer, or fields that are missing or do not fit.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise LoadError(
            f"{where}: the tokenizer {kind!r} is not supported; accepted is 'gpt2' (byte-level "
            "BPE). A Hugging Face folder with a tokenizer.json works."
        )
    backend = _gguf_backend(metadata, where)
    tokens = metadata["tokenizer.ggml.tokens"]
    special: dict[str, str] = {}
    for name in ("bos", "eos"):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            special[f"{name}_token"] = tokens[token_id]
    if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A",
            special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])],
        )
    return DemoTokenizer(backend, metadata.get("tokenizer.chat_template"), special)


def tokenizer_from_folder(folder: Path) -> DemoTokenizer:
    """The tokenizer of a Hugging Face folder (tokenizer.json, tokenizer_config.json).

    Raises:
        LoadError: tokenizer.json is missing or damaged.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise LoadError(f"{path} is missing; the demo reads no other tokenizer file.")
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
        reason = " ".join(str(error).split())
        raise LoadError(f"{path} is damaged: {reason}. Fetch the file again.") from None
    settings: dict[str, Any] = {}
    settings_file = folder / "tokenizer_config.json"
    if settings_file.is_file():
        settings = read_json(settings_file)
    special: dict[str, str] = {}
    for name in ("bos_token", "eos_token"):
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[name] = text
    template_file = folder / "chat_template.jinja"
    template = settings.get("chat_template")
    if isinstance(template, list):  # several templates by name; the plain chat is "default"
        named = {str(entry.get("name")): entry.get("template") for entry in template}
        template = named.get("default")
    if template_file.is_file():
        template = template_file.read_text(encoding="utf-8")
    return DemoTokenizer(backend, template if isinstance(template, str) else None, special)
