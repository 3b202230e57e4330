"""A torch loop as one writes it by hand: every second layer of a Llama, distilled by KL. Writes a model folder."""

import argparse
import copy
from itertools import chain, islice, repeat
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import kl_div, log_softmax
from transformers import LlamaForCausalLM, get_cosine_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--teacher", type=Path)
parser.add_argument("--ids", type=Path, help="token ids of the text, end to end, as .npy")
parser.add_argument("--rows", type=int)
parser.add_argument("--length", type=int)
parser.add_argument("--steps", type=int)
parser.add_argument("--warmup", type=int)
parser.add_argument("--learning-rate", type=float)
parser.add_argument("--temperature", type=float)
parser.add_argument("--seed", type=int)
parser.add_argument("--out", type=Path)
arguments = parser.parse_args()

torch.manual_seed(arguments.seed)
teacher = LlamaForCausalLM.from_pretrained(arguments.teacher, dtype=torch.float32).eval()
student = copy.deepcopy(teacher).train()
student.model.layers = student.model.layers[::2]
student.config.num_hidden_layers = len(student.model.layers)
optimizer = torch.optim.AdamW(student.parameters(), lr=arguments.learning_rate, fused=True)
schedule = get_cosine_schedule_with_warmup(optimizer, arguments.warmup, arguments.steps)
ids = torch.from_numpy(np.load(arguments.ids)).long()
data = ids[: len(ids) // arguments.length * arguments.length].view(-1, arguments.length)
loader = torch.utils.data.DataLoader(data, arguments.rows, shuffle=True, drop_last=True)
tau = arguments.temperature

for batch in islice(chain.from_iterable(repeat(loader)), arguments.steps):
    with torch.no_grad():
        wanted = teacher(batch, use_cache=False).logits
    given = student(batch, use_cache=False).logits
    given, wanted = (log_softmax(logits.flatten(0, 1) / tau, -1) for logits in (given, wanted))
    loss = tau**2 * kl_div(given, wanted, log_target=True, reduction="batchmean")
    loss.backward()
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
student.save_pretrained(arguments.out)
