"""Tokenizers are trained here on a few sentences; no file of a real model is needed."""

import io
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from compress import chat_template
from compress.chat_template import ChatTemplate
from compress.errors import DataError
from compress.tokenizer import Tokenizer, same_tokenizer
from export.errors import ArtifactError

SENTENCES = ["The quick brown fox jumps over the lazy dog.", "A stitch in time saves nine, they say.", "1234 héllo"]
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<filename>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def trained(post_processor=False, sentences=SENTENCES, size=310):
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(sentences * 4, trainer)
    if post_processor:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def files(backend, template=CHATML, generation=None, **config):
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **config}
    found = {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    if template is not None:
        found["chat_template.jinja"] = template.encode()
    if generation is not None:
        found["generation_config.json"] = json.dumps(generation).encode()
    return found


@pytest.fixture(scope="module")
def plain():
    return Tokenizer.from_files(files(trained()))


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_survives_encoding_and_decoding(plain, text):
    assert plain.decode(plain.encode(text)) == text


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.sampled_from([*SPECIALS, "a", " b", "\n"])))
def test_a_literal_special_token_in_plain_text_is_spelled_out(plain, parts):
    text = "".join(parts)
    assert not plain.special_ids & set(plain.encode(text))
    assert plain.decode(plain.encode(text)) == text
    assert sum(i in plain.special_ids for i in plain.encode(text, special=True)) == sum(p in SPECIALS for p in parts)


@pytest.mark.parametrize(
    ("post_processor", "flag", "wants"),
    [(False, None, False), (True, None, True), (False, True, True), (True, False, False), (True, True, True)],
)
def test_the_flag_says_whether_a_bos_is_wanted_and_else_the_post_processor(post_processor, flag, wants):
    tokenizer = Tokenizer.from_files(files(trained(post_processor), add_bos_token=flag))
    assert tokenizer.wants_bos == wants
    assert tokenizer.with_bos(tokenizer.encode("fox")).count(0) == wants
    assert tokenizer.with_bos([0, 0, 9]) == [0, 9]


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("emits", [False, True])
def test_a_template_that_writes_a_bos_does_not_double_it(wants, emits):
    template = ("{{ bos_token }}" if emits else "") + CHATML
    tokenizer = Tokenizer.from_files(files(trained(wants), template))
    ids, offsets = tokenizer.encode_chat(tokenizer.chat([{"role": "user", "content": "fox"}]))
    assert ids.count(0) == (wants or emits) and len(ids) == len(offsets)
    assert (ids[0] == 0) == (wants or emits)


def test_special_ids_come_from_the_config_and_every_end_from_the_generation_config():
    tokenizer = Tokenizer.from_files(files(trained(), generation={"eos_token_id": [1, 3], "pad_token_id": 1}))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 1)
    assert tokenizer.eos_ids == {1, 3} and tokenizer.vocab_size == 310


def test_special_tokens_map_fills_in_for_the_config():
    found = files(trained(), bos_token=None, eos_token=None)
    found["special_tokens_map.json"] = b'{"eos_token": {"content": "<|im_end|>"}}'
    tokenizer = Tokenizer.from_files(found)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, 3, None)


def test_a_rendered_template_becomes_special_tokens(plain):
    rendered = plain.chat([{"role": "user", "content": "fox"}], add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nfox<|im_end|>\n<|im_start|>assistant\n"
    assert [i for i in plain.encode_chat(rendered)[0] if i in plain.special_ids] == [2, 3, 2]


def test_a_special_token_in_a_message_stays_a_literal(plain):
    content = "say <|im_end|> twice: <|im_end|>"
    rendered = plain.chat([{"role": "user", "content": plain.guard(content)}])
    ids, offsets = plain.encode_chat(rendered)
    assert [i for i in ids if i in plain.special_ids] == [2, 3]
    assert plain.decode(ids) == f"<|im_start|>user\n{content}<|im_end|>\n"
    assert rendered[slice(*offsets[-2])] == "<|im_end|>"


def test_the_continuation_of_a_text_leaves_the_ids_of_the_text_alone(plain):
    after = plain.encode_continuation(" brown fox", "The quick")
    assert plain.decode(after) == " brown fox"
    assert plain.decode(plain.encode("The qui") + plain.encode_continuation("ck", "The qui")) == "The quick"


def test_the_same_tokenizer_is_told_from_another():
    one = Tokenizer.from_files(files(trained()))
    assert same_tokenizer(one, Tokenizer.from_files(files(trained(True), add_bos_token=False))) is None
    padded = trained()
    padded.add_tokens([tokenizers.AddedToken(f"[PAD{i}]", special=True) for i in range(310, 320)])
    assert same_tokenizer(one, Tokenizer.from_files(files(padded))) is None
    longer = trained()
    longer.add_tokens(["<think>"])
    assert "'<think>'" in same_tokenizer(one, Tokenizer.from_files(files(longer)))
    other = trained(sentences=["Entirely different words make other merges."])
    assert "token" in same_tokenizer(one, Tokenizer.from_files(files(other)))
    digits = trained()
    digits.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert "differently" in same_tokenizer(one, Tokenizer.from_files(files(digits)))


def test_a_fingerprint_changes_with_what_determines_ids():
    backends = [trained(), trained(size=309)]
    prints = {Tokenizer.from_files(files(backend)).fingerprint for backend in backends}
    prints.add(Tokenizer.from_files(files(trained(), add_bos_token=True)).fingerprint)
    assert len(prints) == 3
    assert Tokenizer.from_files(files(trained(), template=None)).fingerprint in prints


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": b"{"}, "tokenizer.json: cannot be read"),
        ({"tokenizer.json": b"\xff"}, "tokenizer.json: cannot be read"),
        ({"tokenizer.model": b"\x0a\xff\xff\xff\x7f"}, "tokenizer.model: not a SentencePiece model"),
        ({"tokenizer.model": b""}, "tokenizer.model: holds no pieces"),
        ({"tokenizer.json": b"{}", "tokenizer_config.json": b"[1]"}, "must be a JSON object"),
    ],
)
def test_a_broken_file_is_named_in_one_line(broken, says):
    with pytest.raises(ArtifactError, match=says) as caught:
        Tokenizer.from_files(broken)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_template_says_what_to_do():
    with pytest.raises(DataError, match="add chat_template"):
        Tokenizer.from_files(files(trained(), template=None)).chat([{"role": "user", "content": "fox"}])


def test_the_default_of_several_named_templates_is_taken():
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}!"}]
    tokenizer = Tokenizer.from_files(files(trained(), None, chat_template=named))
    assert tokenizer.chat([{"role": "user", "content": "fox"}]) == "fox!"


def test_a_template_has_the_functions_that_models_expect():
    source = (
        "{%- for m in messages -%}\n    {%- if loop.last %}{% generation %}{{ m | tojson }}{% endgeneration %}"
        "{%- endif %}{%- if m.role == 'x' %}{% continue %}{% endif %}\n{%- endfor %}{{ strftime_now('%Y')|length }}"
        "{{ 'a' ~ 1 ~ none }}"
    )
    rendered = ChatTemplate(source).render({"messages": [{"role": "x", "content": "<é>"}]})
    assert rendered == '{"role": "x", "content": "<é>"}4a1None'


def test_a_template_may_refuse_the_messages():
    with pytest.raises(DataError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render({})


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' * 9999 }}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ 'a'.ljust(10 ** 12) }}",
        "{% set n = namespace(x='aa') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 'a'|center(10 ** 9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
        "{{ ('a' * 1000).join(range(99999)|map('string')) }}",
        "{{ range(99999)|join('a' * 1000) }}",
        "{{ ('a' * 100000).replace('a', 'b' * 1000) }}",
        "{{ ('a' * 100000)|replace('a', 'b' * 1000) }}",
        "{{ ('a\\n' * 10000)|indent(10000) }}",
        "{{ ('a ' * 1000)|wordwrap(1, wrapstring='b' * 10000) }}",
        "{{ range(9)|batch(10 ** 9, 'a')|list }}",
        "{{ range(9999)|list|tojson(indent=10 ** 6) }}",
        "{{ '\\t'.expandtabs(10 ** 6) }}",
        "{{ ('a' * 1000).translate({97: 'b' * 10000}) }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_hostile_template_is_stopped(source, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_STEPS", 10_000)
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 1_000_000)
    with pytest.raises(ArtifactError, match="chat template: stopped"):
        ChatTemplate(source).render({"messages": []})


def test_filters_of_ordinary_size_are_let_through():
    source = (
        "{{ ['a', 'b']|join(', ') }} {{ 'a\\nb'|indent(2) }} {{ '%05.1f %s' % (3, 'x') }} {{ 'x'|center(3) }}"
        " {{ '{:>3}'.format(7) }} {{ 'aa'.replace('a', 'b') }} {{ messages|map(attribute='role')|join('+') }}"
        " {{ messages|join('+', attribute='role') }} {{ 'a b'|wordwrap(1)|length }} {{ '%d'|format(1234567890) }}"
    )
    rendered = ChatTemplate(source).render({"messages": [{"role": "user"}, {"role": "tool"}]})
    assert rendered == "a, b a\n  b 003.0 x  x    7 bb user+tool user+tool 3 1234567890"


def test_a_template_that_does_not_compile_is_an_artifact_error():
    with pytest.raises(ArtifactError, match="does not compile"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize("dummy_prefix", [False, True])
def test_a_sentencepiece_model_gives_the_ids_that_its_own_library_gives(dummy_prefix):
    sentencepiece = pytest.importorskip("sentencepiece")
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 20),
        model_writer=buffer,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        add_dummy_prefix=dummy_prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["<sep>"],
        minloglevel=2,
    )
    reference = sentencepiece.SentencePieceProcessor(model_proto=buffer.getvalue())
    tokenizer = Tokenizer.from_files({"tokenizer.model": buffer.getvalue()})
    assert tokenizer.wants_bos and (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    for text in [*SENTENCES, "", " two  spaces ", "日本 😀", "the dog<sep>fox", "a </s> literal", "x\n\ny"]:
        ids = tokenizer.encode(text)
        if "<sep>" not in text or not dummy_prefix:  # the text after a symbol gets its own prefix here
            assert ids == reference.encode(text), text
        if "<sep>" not in text:
            assert tokenizer.decode(ids) == text
