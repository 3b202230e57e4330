"""A plain torch loop: KL(teacher || student) over the whole vocabulary, all weights trained. Prints JSON."""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch.nn.functional import kl_div, log_softmax
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
import smollm2_shape as shape

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float32")
parser.add_argument("--rows", type=int)
parser.add_argument("--length", type=int)
parser.add_argument("--steps", type=int)
arguments = parser.parse_args()

torch.manual_seed(0)
config = LlamaConfig(**{name: value for name, value in shape.CONFIG.items() if name != "architectures"})
teacher, student = (LlamaForCausalLM(config).to(getattr(torch, arguments.dtype)) for _ in range(2))
teacher.eval()
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5, fused=True)
ids = torch.from_numpy(shape.tokens(arguments.rows, arguments.length)).long()


def step() -> None:
    with torch.no_grad():
        wanted = teacher(ids, use_cache=False).logits
    given = student(ids, use_cache=False).logits
    given, wanted = (log_softmax(logits.float().flatten(0, 1), -1) for logits in (given, wanted))
    kl_div(given, wanted, log_target=True, reduction="batchmean").backward()
    optimizer.step()
    optimizer.zero_grad()


print(json.dumps(shape.time_steps(step, arguments.steps)))
