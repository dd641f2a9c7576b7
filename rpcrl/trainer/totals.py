"""What has a run done so far, over all its lives? Kept in each checkpoint and written out in summary.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Totals"]


@dataclass
class Totals:
    """Sums over the steps of a run; a resumed run goes on from those of its checkpoint."""

    wall_s: float = 0.0
    phases_s: dict[str, float] = field(default_factory=dict)
    weight_syncs: int = 0
    tokens: int = 0
    """Prompt and response tokens of the training samples."""
    heldout_start: float | None = None
    heldout_end: float | None = None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Totals:
        """Read what ``to_json`` wrote; raises TypeError for unknown names."""
        return cls(**content)

    def to_json(self) -> dict[str, Any]:
        """Return the sums as plain objects."""
        return asdict(self)

    def add_phases(self, phases_s: Mapping[str, float]) -> None:
        """Add one step's phases, in seconds."""
        for phase, seconds in phases_s.items():
            self.phases_s[phase] = self.phases_s.get(phase, 0.0) + seconds

    def saw_heldout(self, accuracy: float, *, step: int) -> None:
        """Note a held-out figure: the one before training (step 0) is the start, the last one the end."""
        if step == 0:
            self.heldout_start = accuracy
        self.heldout_end = accuracy
