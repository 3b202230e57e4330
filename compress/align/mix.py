"""How much a preference loss weighs against SFT on the chosen answers, as training goes on."""

from typing import Any

STAGES = 4
TOLERANCE = 0.1


class Staged:
    """The weight rises from 0 to 1 in quarters, one a validation, as long as the held-out win rate holds.

    Where the win rate falls by more than a tenth of its best, the weight falls to 0, which is the SFT baseline, and
    rises anew once the win rate is back.
    """

    def __init__(self) -> None:
        self.stage, self.best = 0, 0.0
        self.used = False

    @property
    def weight(self) -> float:
        """The preference loss's weight in 0..1; SFT has the rest."""
        return self.stage / STAGES

    def take(self) -> float:
        """The weight, for a batch to train on."""
        self.used = True
        return self.weight

    def observe(self, win_rate: float) -> None:
        """Go on from a validation's win rate in 0..1; NaN counts as a fall.

        A weight that no batch has been trained with is not judged: of the untrained model the win rate is noise.
        """
        if not self.used:
            return
        self.used, self.best = False, max(self.best, win_rate)
        holds = win_rate >= (1 - TOLERANCE) * self.best
        self.stage = min(self.stage + 1, STAGES) if holds else 0

    def state(self) -> dict[str, Any]:
        """What `restore` continues from, as JSON."""
        return {"stage": self.stage, "best": self.best, "used": self.used}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""
        self.stage, self.best, self.used = state["stage"], state["best"], state["used"]
