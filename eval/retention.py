"""How much of what the adapters taught survived the merge and the quantization.

Letters: N tokens of a chunk, V vocabulary, D documents.
"""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eval.errors import EvidenceError
from eval.scores import Chunk
from eval.stats import Estimate, ratio

BASE, ADAPTED, LANDED = "base", "adapted", "landed"


@dataclasses.dataclass(frozen=True)
class Retention:
    """Sums over scored tokens, one row a document.

    Attributes:
      document: ids, ascending.
      dot: sum of <landed - base, adapted - base>.
      taught: sum of |adapted - base|^2.
      lost: sum of |landed - adapted|^2.
      tokens: tokens summed.
    """

    document: Int[np.ndarray, " D"]
    dot: Float[np.ndarray, " D"]
    taught: Float[np.ndarray, " D"]
    lost: Float[np.ndarray, " D"]
    tokens: int

    def share(self, *, confidence: float = 0.95, seed: int = 0) -> Estimate:
        """<landed - base, adapted - base> / |adapted - base|^2: 1 if all survived, 0 if the adapters were dropped.

        NaN if the adapters changed no logit at all.
        """
        return ratio(self.dot, self.taught, confidence=confidence, seed=seed)

    def residual(self, *, confidence: float = 0.95, seed: int = 0) -> Estimate:
        """|landed - adapted| / |adapted - base|: 0 if the landed model is the adapted one; NaN as in `share`."""
        square = ratio(self.lost, self.taught, confidence=confidence, seed=seed)
        return square.map(lambda x: max(x, 0.0) ** 0.5 if x == x else x)


@jax.jit
def token_retention(
    base: Float[Array | np.ndarray, "N V"],
    adapted: Float[Array | np.ndarray, "N W"],
    landed: Float[Array | np.ndarray, "N X"],
) -> Float[Array, "N 3"]:
    """Per token: <landed - base, adapted - base>, |adapted - base|^2 and |landed - adapted|^2, in float32.

    Over the columns that all three have. `base` is the packed base with its adapters off, `adapted` with them on,
    and `landed` the model that is released.
    """
    width = min(base.shape[-1], adapted.shape[-1], landed.shape[-1])
    b, a, x = (logits[:, :width].astype(jnp.float32) for logits in (base, adapted, landed))
    rows = [(x - b) * (a - b), (a - b) ** 2, (x - a) ** 2]
    return jnp.stack([jnp.sum(row, axis=-1) for row in rows], axis=-1)


def accumulate(chunks: Iterable[Chunk]) -> Retention:
    """Sum `token_retention` over the scored tokens of chunks whose logits are named base, adapted and landed.

    Raises:
      EvidenceError: if a chunk lacks one of the three, or no token is scored.
    """
    rows, documents = [np.zeros((0, 3))], [np.zeros(0, np.int64)]
    for chunk in chunks:
        absent = [name for name in (BASE, ADAPTED, LANDED) if name not in chunk.logits]
        if absent:
            raise EvidenceError(f"retention needs logits named base, adapted and landed; no {', '.join(absent)}")
        keep = np.asarray(chunk.mask) > 0
        sums = token_retention(chunk.logits[BASE], chunk.logits[ADAPTED], chunk.logits[LANDED])
        rows.append(np.asarray(sums, np.float64)[keep])
        documents.append(np.asarray(chunk.document)[keep])
    values = np.concatenate(rows)
    ids, index = np.unique(np.concatenate(documents), return_inverse=True)
    if not len(values):
        raise EvidenceError("retention: no token to score; the data is empty or every token is masked out")
    dot, taught, lost = (np.bincount(index, weights=column) for column in values.T)
    return Retention(ids, dot, taught, lost, len(values))
