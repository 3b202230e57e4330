"""llm-compressor's GPTQ with its defaults: 4 bits, groups of 32, symmetric. Prints JSON.

Arguments: a float model folder, and calibration ids [rows, length] as .npy.
"""

import json
import resource
import sys
import time

import numpy as np
import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from transformers import AutoModelForCausalLM

folder, ids = sys.argv[1], np.load(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
scheme = {"targets": ["Linear"], "weights": weights}
recipe = GPTQModifier(config_groups={"all": scheme}, ignore=["lm_head"])
rows = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": np.ones_like(ids).tolist()})
options = {"max_seq_length": ids.shape[1], "num_calibration_samples": len(ids), "shuffle_calibration_samples": False}
wall, cpu = time.perf_counter(), time.process_time()
oneshot(model=model, recipe=[recipe], dataset=rows, **options)
print(
    json.dumps(
        {
            "wall": time.perf_counter() - wall,
            "cpu": time.process_time() - cpu,
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20),
        }
    )
)
