"""TRL's DPOTrainer with PEFT's LoRA on every linear. Prints JSON.

A step computes the reference too, except with --precompute: then it is computed once, before training, and told apart.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))
import smollm2_shape as shape

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float32")
parser.add_argument("--precompute", action="store_true")
parser.add_argument("--pairs", type=int)
parser.add_argument("--prompt", type=int)
parser.add_argument("--answer", type=int)
parser.add_argument("--rank", type=int)
parser.add_argument("--alpha", type=int)
parser.add_argument("--steps", type=int)
arguments = parser.parse_args()

reference, clock = shape.Clock(), shape.Clock()


class Timed(DPOTrainer):
    """Marks when a batch's reference has been computed."""

    def compute_ref_log_probs(self, *inputs):
        found = super().compute_ref_log_probs(*inputs)
        reference.mark()
        return found


class Marks(TrainerCallback):
    """Marks when a step begins, and the end."""

    def on_step_begin(self, *arguments, **options):
        clock.mark()

    def on_train_end(self, *arguments, **options):
        clock.mark()


torch.manual_seed(0)
config = LlamaConfig(**{name: value for name, value in shape.CONFIG.items() if name != "architectures"})
words = ["<eos>", "<pad>", *map(str, range(2, config.vocab_size))]
by_word = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=by_word, eos_token="<eos>", pad_token="<pad>")
rows = []
for ids in shape.tokens(arguments.pairs * (1 + arguments.steps), arguments.prompt + 2 * arguments.answer):
    parts = np.split(ids, [arguments.prompt, arguments.prompt + arguments.answer])
    for answer in parts[1:]:
        answer[-1] = tokenizer.eos_token_id  # or the trainer would add one
    texts = ("".join(f" {words[i]}" for i in part) for part in parts)
    rows.append(dict(zip(("prompt", "chosen", "rejected"), texts)))
reference.mark()
with tempfile.TemporaryDirectory() as folder:
    trainer = Timed(
        LlamaForCausalLM(config).to(getattr(torch, arguments.dtype)),
        args=DPOConfig(
            folder,
            per_device_train_batch_size=arguments.pairs,
            max_steps=1 + arguments.steps,
            max_length=arguments.prompt + arguments.answer,
            precompute_ref_log_probs=arguments.precompute,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Marks()],
        peft_config=LoraConfig(
            r=arguments.rank, lora_alpha=arguments.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    trainer.train()
print(json.dumps(clock.figures() | ({"reference": reference.figures()} if arguments.precompute else {})))
