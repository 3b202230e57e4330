"""Which tokens of a row are targets."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from compress.data.examples import example, pair
from compress.data.rows import Row
from compress.errors import DataError
from compress.tokenizer import Tokenizer

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A BOS, spaces around trimmed words, no generation prompt.
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content|trim + ' ' + eos_token }}"
    "{% else %}{{ '[INST] ' + m.content|trim + ' [/INST]' }}{% endif %}{% endfor %}"
)
# History is written differently from the last turn, and the generation prompt is not part of what it becomes.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# Nothing ends a turn, and a conversation must begin with the user.
NAKED = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('begin with user') }}{% endif %}"
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TALK = [
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "hello world"},
    {"role": "user", "content": "hello world"},
    {"role": "assistant", "content": "bye"},
]


def tokenizer(template=None, *, bos=False, eos="</s>", metaspace=False):
    backend = tokenizers.Tokenizer(models.BPE())
    if metaspace:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=[*pre_tokenizers.ByteLevel.alphabet(), "▁", "\n", "[", "]"],
        show_progress=False,
    )
    backend.train_from_iterator(["hello world, hi there, bye", "[INST] [/INST] user assistant\n"] * 4, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    config = {"bos_token": "<s>", "eos_token": eos, "pad_token": eos}
    found = {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    return Tokenizer.from_files(found | ({"chat_template.jinja": template.encode()} if template else {}))


def row(kind, **values):
    return Row(kind, values, "data.jsonl:1", (0, 0, 2))


def targets(sample, by):
    """The text of each run of targets."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.mask, [0]])))
    return [by.decode(sample.tokens[a:b]) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("bos", [False, True])
def test_every_token_of_a_text_but_the_first_is_a_target(bos):
    by = tokenizer(bos=bos)
    sample = example(row("text", text="hello world"), by)
    assert sample.tokens.tolist() == [0] * bos + by.encode("hello world")
    assert sample.mask.tolist() == [False] + [True] * (len(sample) - 1)


@pytest.mark.parametrize("bos", [False, True])
def test_token_ids_are_taken_as_they_are_with_one_bos_where_wanted(bos):
    by = tokenizer(bos=bos)
    for tokens in ([9, 8], [0, 9, 8]):
        sample = example(row("tokens", tokens=tokens), by)
        assert sample.tokens.tolist() == ([0] if bos or tokens[0] == 0 else []) + [9, 8]
    with pytest.raises(DataError, match="token id 5000"):
        example(row("tokens", tokens=[5000]), by)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("metaspace", [False, True])
def test_a_completion_and_its_one_eos_are_the_targets(bos, metaspace):
    by = tokenizer(bos=bos, metaspace=metaspace)
    sample = example(row("completion", prompt="hello", completion=" world</s>"), by)
    assert by.decode(sample.tokens[bos:]) == "hello world</s></s>"  # the first end is a literal
    assert sample.tokens.tolist().count(0) == bos and sample.tokens.tolist().count(1) == 1
    assert sample.tokens[-1] == 1 and sample.mask[-1]
    assert by.decode(sample.tokens[sample.start :]).strip() == "world</s></s>"
    assert np.array_equal(sample.mask, np.arange(len(sample)) >= sample.start)


def test_a_completion_without_a_prompt_does_not_make_its_first_token_a_target():
    sample = example(row("completion", prompt="", completion="hello"), tokenizer())
    assert not sample.mask[0] and sample.mask[1:].all()


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", ["</s>", "<|im_end|>"])
def test_assistant_turns_through_the_token_that_ends_them_are_the_targets(bos, eos):
    by = tokenizer(CHATML, bos=bos, eos=eos)
    sample = example(row("messages", messages=TALK), by)
    assert targets(sample, by) == ["hello world<|im_end|>", "bye<|im_end|>"]
    assert sample.tokens.tolist().count(0) == bos
    assert 1 not in sample.tokens  # the template's own end is the only one


@pytest.mark.parametrize("bos", [False, True])
def test_a_template_with_a_bos_and_trimmed_words_is_masked_rightly(bos):
    by = tokenizer(BRACKETS, bos=bos)
    talk = [{**m, "content": f" {m['content']}\n"} for m in TALK]
    sample = example(row("messages", messages=talk), by)
    assert targets(sample, by) == [" hello world </s>", " bye </s>"]
    assert sample.tokens.tolist().count(0) == 1 and sample.tokens[0] == 0


def test_a_template_that_writes_history_differently_is_masked_rightly():
    by = tokenizer(THINKING)
    assert targets(example(row("messages", messages=TALK), by), by) == [
        "hello world<|im_end|>",
        "\n</think>\n\nbye<|im_end|>",
    ]


def test_a_last_turn_that_the_template_does_not_end_gets_one_eos():
    by = tokenizer(NAKED)
    sample = example(row("messages", messages=TALK), by)
    assert [text.strip() for text in targets(sample, by)] == ["hello world", "bye</s>"]
    assert sample.tokens.tolist().count(1) == 1


def test_a_special_token_in_the_words_of_a_user_does_not_end_a_turn():
    by = tokenizer(CHATML, eos="<|im_end|>")
    talk = [
        {"role": "user", "content": "x<|im_end|>\n<|im_start|>assistant\ny"},
        {"role": "assistant", "content": "a<|im_end|>b"},
    ]
    sample = example(row("messages", messages=talk), by)
    assert targets(sample, by) == ["a<|im_end|>b<|im_end|>"]
    assert sample.tokens.tolist().count(3) == 2 and sample.tokens.tolist().count(2) == 2


def test_an_empty_turn_is_its_end_alone():
    by = tokenizer(CHATML)
    talk = [TALK[0], {"role": "assistant", "content": ""}]
    assert targets(example(row("messages", messages=talk), by), by) == ["<|im_end|>"]


def test_of_a_pair_only_the_answers_are_targets():
    by = tokenizer(CHATML)
    chosen, rejected = pair(row("preference", prompt=TALK[:3], chosen=TALK[3:], rejected=TALK[1:2]), by)
    assert targets(chosen, by) == ["bye<|im_end|>"] and targets(rejected, by) == ["hello world<|im_end|>"]
    assert chosen.start == rejected.start
    assert np.array_equal(chosen.tokens[: chosen.start], rejected.tokens[: chosen.start])
    chosen, rejected = pair(row("preference", prompt="hi", chosen=" there", rejected=" bye"), by)
    assert targets(chosen, by) == [" there</s>"] and targets(rejected, by) == [" bye</s>"]


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (CHATML, TALK[:1], "no message of role 'assistant'"),
        (NAKED, TALK[1:], "begin with user"),
        (None, TALK, "no chat template"),
    ],
)
def test_a_conversation_that_cannot_be_learned_from_says_why(template, messages, says):
    with pytest.raises(DataError, match=says):
        example(row("messages", messages=messages), tokenizer(template))
