"""Text to token ids and back, with the special tokens and the chat template of a model folder."""

import datetime
import functools
import hashlib
import json
import random
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers

from compress.chat_template import ChatTemplate
from compress.errors import DataError
from compress.sentencepiece_model import tokenizer_from_model
from export.errors import ArtifactError

Message = dict[str, Any]
MAX_FILE = 1 << 28
_GUARD = "\ue0ff"  # private use: put inside a literal special token to keep it a literal


class Tokenizer:
    """The tokenizer of a model folder.

    `encode` never adds a token that is not in the text: `with_bos` puts the one BOS in front where it is wanted.

    Attributes:
      bos_id, eos_id, pad_id: None where the model names none.
      wants_bos: `add_bos_token` of tokenizer_config.json, else whether the post-processor puts one.
      eos_ids: every id that ends a generation: `eos_id` and those of generation_config.json.
      vocab_size: highest id + 1; a model's embedding may have more rows (padding).
      rows: of the embedding: an id beyond is refused. `vocab_size` where nobody has said.
      fingerprint: sha256 of what determines ids; equal fingerprints give equal ids.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict, generation: dict, template: str | None):
        self._backend, self._lock = backend, threading.Lock()
        backend.no_padding()
        backend.no_truncation()
        self._vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocabulary.values(), default=-1) + 1
        self.rows = self.vocab_size
        self.base_size = max(backend.get_vocab(with_added_tokens=False).values(), default=-1) + 1
        self._names = _special_names(config)
        self.bos_id = self._special_id("bos", generation)
        self.eos_id = self._special_id("eos", generation)
        self.pad_id = self._special_id("pad", generation)
        ends = set(_ids(generation.get("eos_token_id")))
        self.eos_ids = frozenset(ends if self.eos_id is None else ends | {self.eos_id})
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.wants_bos = self._finds_bos(config.get("add_bos_token"))
        self._template_source = template

    @classmethod
    def from_files(cls, files: dict[str, bytes]) -> "Tokenizer":
        """Build from the files that travel with a checkpoint; tokenizer.json is preferred to tokenizer.model.

        Raises:
          ArtifactError: neither file is there, or one cannot be read.
        """
        config = _json(files, "tokenizer_config.json")
        for name, value in _json(files, "special_tokens_map.json").items():
            if config.get(name) is None:
                config[name] = value
        if "tokenizer.json" in files:
            _bound(files, "tokenizer.json")
            try:
                backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
            except Exception as error:  # the library raises bare Exception
                raise ArtifactError(f"tokenizer.json: cannot be read: {error}") from None
        elif "tokenizer.model" in files:
            _bound(files, "tokenizer.model")
            backend, names = tokenizer_from_model(files["tokenizer.model"])
            for name, value in names.items():
                if config.get(name) is None:
                    config[name] = value
        else:
            raise ArtifactError("no tokenizer.json and no tokenizer.model beside the weights: copy one there")
        return cls(backend, config, _json(files, "generation_config.json"), _template(files, config))

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`, without BOS or EOS.

        With `special` a literal such as `<|im_start|>` becomes its special token, as in a rendered template;
        without, as in plain text, it is spelled out.
        """
        return self._encode(text, special).ids

    def encode_with_offsets(self, text: str, *, special: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        """`encode`, and for each token the half-open range of characters of `text` that it stands for."""
        encoding = self._encode(text, special)
        return encoding.ids, encoding.offsets

    def encode_continuation(self, text: str, after: str) -> list[int]:
        """Token ids of `text` as it continues `after`, whose own ids (`encode(after)`) are left alone.

        Where the two do not merge these are the last ids of the whole; else `text` is encoded by itself, without
        the space that SentencePiece puts before a beginning.
        """
        first, whole = self.encode(after), self.encode(after + text)
        if whole[: len(first)] == first:
            return whole[len(first) :]
        newline, whole = self.encode("\n"), self.encode("\n" + text)
        return whole[len(newline) :] if whole[: len(newline)] == newline else self.encode(text)

    def check_rows(self, ids: Sequence[int]) -> None:
        """Refuse ids that the model has no embedding for.

        Raises:
          DataError: naming the first of them.
        """
        beyond = next((i for i in ids if i >= self.rows), None)
        if beyond is not None:
            raise DataError(f"token id {beyond}: the model has {self.rows}")

    def with_bos(self, ids: Sequence[int]) -> list[int]:
        """`ids` with exactly one BOS in front if the tokenizer wants one or they have one already."""
        count = 0
        while count < len(ids) and ids[count] == self.bos_id:
            count += 1
        if self.bos_id is not None and (self.wants_bos or count):
            return [self.bos_id, *ids[count:]]
        return list(ids)

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special: bool = False) -> str:
        """The text of `ids`; ids beyond the vocabulary (padding rows) are left out."""
        known = [int(i) for i in ids if 0 <= int(i) < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special)

    @property
    def end_ids(self) -> frozenset[int]:
        """Every id that may end a turn: `eos_ids`, and all special tokens but BOS."""
        return self.eos_ids | (self.special_ids - {self.bos_id})

    @functools.cached_property
    def fingerprint(self) -> str:
        state = json.loads(self._backend.to_str())
        parts = {name: state.get(name) for name in ("model", "added_tokens", "normalizer", "pre_tokenizer")}
        parts["bos"] = self.bos_id if self.wants_bos else None
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, now: datetime.datetime | None = None
    ) -> str:
        """The conversation as the model's chat template writes it; encode it with `encode_chat`, or `special=True`.

        Args:
          now: the date for templates that print one; the clock if not given.
        Raises:
          DataError: the model has no template, or the template refuses the messages.
          ArtifactError: the template is broken or leaves its bounds.
        """
        variables = {"tools": None, "documents": None, **self._names}
        return self._chat_template.render(
            {**variables, "messages": list(messages), "add_generation_prompt": add_generation_prompt}, now
        )

    def guard(self, text: str) -> str:
        """`text` with its literal special tokens marked, so that they stay literals through a chat template."""
        if self._special_literal is None:
            return text
        return self._special_literal.sub(lambda m: m[0][0] + _GUARD + m[0][1:], text)

    def encode_chat(self, rendered: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, with one BOS where wanted, and character ranges of what `chat` rendered from guarded messages.

        A literal special token in a message's own words is spelled out; BOS that was added has the range (0, 0).
        """
        if _GUARD not in rendered:
            ids, offsets = self.encode_with_offsets(rendered, special=True)
        else:
            ids, offsets = self._encode_guarded(rendered)
        whole = self.with_bos(ids)
        cut = len(ids) - len(whole)
        return whole, offsets[cut:] if cut >= 0 else [(0, 0), *offsets]

    def _encode_guarded(self, rendered: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        pieces = re.split(f"({self._special_literal.pattern})", rendered) if self._special_literal else [rendered]
        start = 0
        for index, piece in enumerate(pieces):
            special = index % 2 == 1
            plain = piece if special else piece.replace(_GUARD, "")
            kept = [i for i, character in enumerate(piece) if special or character != _GUARD] + [len(piece)]
            more, ranges = self.encode_with_offsets(plain, special=special)
            ids += more
            offsets += [(start + kept[a], start + kept[b]) for a, b in ranges]
            start += len(piece)
        return ids, offsets

    def _encode(self, text: str, special: bool) -> tokenizers.Encoding:
        try:
            with self._lock:  # the switch is the tokenizer's, not the call's
                self._backend.encode_special_tokens = not special
                encoding = self._backend.encode(text, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):  # which of them depends on the surrogate
            raise DataError("text with a lone surrogate cannot be encoded: it is not valid Unicode") from None
        self.check_rows(encoding.ids)
        return encoding

    @functools.cached_property
    def _special_literal(self) -> re.Pattern | None:
        tokens = self._backend.get_added_tokens_decoder()
        contents = sorted((tokens[i].content for i in self.special_ids), key=len, reverse=True)
        contents = [content for content in contents if len(content) > 1]
        return re.compile("|".join(map(re.escape, contents))) if contents else None

    @functools.cached_property
    def _chat_template(self) -> ChatTemplate:
        if self._template_source is None:
            raise DataError(
                "the model has no chat template: add chat_template.jinja to its folder, "
                "or give rows of prompt and completion instead of messages"
            )
        return ChatTemplate(self._template_source)

    def _special_id(self, kind: str, generation: dict) -> int | None:
        name = self._names.get(f"{kind}_token")
        if name is not None and name in self._vocabulary:
            return self._vocabulary[name]
        return next(iter(_ids(generation.get(f"{kind}_token_id"))), None)

    def _finds_bos(self, flag: Any) -> bool:
        if self.bos_id is None:
            return False
        if isinstance(flag, bool):
            return flag
        return self._backend.encode("a", add_special_tokens=True).ids[:1] == [self.bos_id]


def same_tokenizer(a: Tokenizer, b: Tokenizer) -> str | None:
    """Why `a` and `b` may give different ids for a text, or None if they do not.

    Rows that only pad a vocabulary (no token, or one named `[PAD7]`) may be there in one and not in the other.
    Ids are compared token by token, then on text that uses every token.
    """
    if a.fingerprint == b.fingerprint:
        return None
    ours = {i: t for t, i in a._vocabulary.items()}
    theirs = {i: t for t, i in b._vocabulary.items()}
    for i in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(i), theirs.get(i)
        if one != other and not (_is_padding(one) and _is_padding(other)):
            return f"token {i} is {one!r} in one and {other!r} in the other"
    for text in _probes(a):
        one_ids, other_ids = a.encode(text), b.encode(text)
        if one_ids != other_ids:
            at = next((k for k, (x, y) in enumerate(zip(one_ids, other_ids, strict=False)) if x != y), -1)
            at = min(len(one_ids), len(other_ids)) if at < 0 else at
            return f"the same vocabulary, but they split {a.decode(one_ids[max(at - 2, 0) : at + 3])!r} differently"
    return None


def _is_padding(token: str | None) -> bool:
    return token is None or re.fullmatch(r"\[PAD\d+\]", token) is not None


_PROBE = (
    "Hello, world! It's 1234567 o'clock; they'RE  here:\n\n\tdef f(x):\n        return x**2  # 3.14\r\n"
    "Ünïcödé naïve café — 日本語テキスト 한국어 العربية हिन्दी 😀👍🏽 ﬁ ① e\u0301   trailing  "
)


def _probes(tokenizer: Tokenizer) -> list[str]:
    """Texts that between them use about every token of the vocabulary."""
    ids = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
    random.Random(0).shuffle(ids)
    return [_PROBE] + [tokenizer.decode(ids[k : k + 4096]) for k in range(0, len(ids), 4096)]


def _special_names(config: dict) -> dict[str, str]:
    """bos_token, eos_token, … as strings; each may be an object with a `content`."""
    names = {}
    for kind in ("bos", "eos", "pad", "unk"):
        value = config.get(f"{kind}_token")
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            names[f"{kind}_token"] = value
    return names


def _template(files: dict[str, bytes], config: dict) -> str | None:
    if "chat_template.jinja" in files:
        _bound(files, "chat_template.jinja")
        return files["chat_template.jinja"].decode("utf-8", "replace")
    template = config.get("chat_template")
    if isinstance(template, list):  # an older form: named templates
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 31]


def _bound(files: dict[str, bytes], name: str) -> None:
    if len(files[name]) > MAX_FILE:
        raise ArtifactError(f"{name}: {len(files[name])} bytes; at most {MAX_FILE} are read")


def _json(files: dict[str, bytes], name: str) -> dict:
    if name not in files:
        return {}
    _bound(files, name)
    try:
        value = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{name}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{name}: must be a JSON object, not {type(value).__name__}")
    return value
