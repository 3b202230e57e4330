"""What happened in a training run: a row a step, a row a validation, and what its guards did."""

import dataclasses
import json
import math
from typing import Any


def tell(event: dict[str, Any]) -> str:
    """An event in words, without its step."""
    match event["event"]:
        case "rollback":
            back = f"went back to step {event['to']} with {event['scale']:.3g} of the learning rate"
            return f"{event['why']}; {back}"
        case "out of memory":
            return f"the device is out of memory; {event['per_device_batch']} rows at a time from here on"
        case "beta":
            return f"KL to the reference is {event['kl']:.4g}; beta is {event['scale']:g} times what it was set to"
        case "stopped":
            return f"stopped: {event['why']}"
    return str(event["event"])


@dataclasses.dataclass
class Trace:
    """What happened.

    Attributes:
      steps: a row a step; those that a guard has taken back are gone.
      validations: a row a validation.
      events: what the guards did, and when: {"step", "event", ...}.
      best_step: the step whose weights are kept.
    """

    steps: list[dict[str, float]] = dataclasses.field(default_factory=list)
    validations: list[dict[str, float]] = dataclasses.field(default_factory=list)
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    best_step: int = 0

    @property
    def best(self) -> dict[str, float]:
        """The validation of the weights that were kept."""
        return next(row for row in self.validations if row["step"] == self.best_step)

    @property
    def best_loss(self) -> float:
        """Its loss; infinite while no step's weights are kept."""
        return self.best["loss"] if self.best_step else math.inf

    def reached(self, level: float) -> int | None:
        """The step of the first validation whose loss is below a level; None if there is none."""
        return next((int(row["step"]) for row in self.validations if row["loss"] < level), None)

    @property
    def stopped(self) -> bool:
        """Whether the run was ended before its last step."""
        return any(event["event"] == "stopped" for event in self.events)

    def state(self) -> dict[str, Any]:
        """The trace as JSON, but with NaN as it is."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """What a stage keeps beside its model; NaN becomes null."""

        def clean(row: dict[str, Any]) -> dict[str, Any]:
            lost = (name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value))
            return row | dict.fromkeys(lost)

        lists = {name: [clean(row) for row in getattr(self, name)] for name in ("steps", "validations", "events")}
        return json.dumps({**lists, "best_step": self.best_step}, allow_nan=False) + "\n"
