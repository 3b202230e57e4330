"""How far a student is from its teacher, seen through a cache of the teacher's k likeliest tokens: a JSON line each.

docs/distill.md has the command and what it printed.
"""

import argparse
import itertools
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from compress.data.batches import Batches
from compress.data.rows import Rows
from compress.distill.buckets import log_buckets, top_buckets
from compress.distill.student import make_student
from compress.models.decoder import hidden_states, logits, stack
from compress.models.folder import Model, load
from compress.train.divergences import forward_kl


def main() -> None:
    """Print tau^2 KL in nats, whole and through buckets, over the same target tokens."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--student", default="half")
    parser.add_argument("--data", required=True)
    parser.add_argument("--batches", type=int, default=16)
    args = parser.parse_args()
    teacher = load(args.teacher).merged().dequantized()
    student = make_student(args.student, teacher, seed=0).dequantized()
    source = Batches(Rows(args.data), teacher.tokenizer, size=4, length=256, shuffle=False, epochs=1, buffer=1 << 16)
    batches = list(itertools.islice(source, args.batches))
    theirs, ours = (np.concatenate([targets(model, batch) for batch in batches]) for model in (teacher, student))
    for temperature, k in itertools.product((1.0, 2.0), (8, 64, 256, 0)):
        see = partial(distance, k=k, temperature=temperature)
        value = float(jnp.mean(jax.lax.map(lambda pair, see=see: see(*pair), (ours, theirs), batch_size=64)))
        print(json.dumps({"temperature": temperature, "top_k": k, "divergence": round(value, 5), "tokens": len(ours)}))


def targets(model: Model, batch) -> np.ndarray:
    """Logits [N, V] that predict the batch's targets."""

    @jax.jit
    def run(stacked, batch):
        states = hidden_states(model.config, stacked, batch.tokens, positions=batch.positions, segments=batch.segments)
        return logits(model.config, stacked, states)[:, :-1]

    return np.asarray(run(stack(model.config, model.weights), batch))[batch.mask[:, 1:] > 0]


def distance(student, teacher, k: int, temperature: float):
    """tau^2 KL(teacher || student) between buckets; between all tokens where k is 0."""
    if not k:
        return temperature**2 * forward_kl(student / temperature, teacher / temperature)
    log_probs, ids = top_buckets(teacher, k, temperature)
    return temperature**2 * forward_kl(log_buckets(student / temperature, ids), log_probs)


if __name__ == "__main__":
    main()
