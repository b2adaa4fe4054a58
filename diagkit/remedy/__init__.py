"""What acts on a live model: `guard` stops the moves that do harm, `heal` mends what they have done.

Standard library and the torch that is there, as everything that runs inside a training job.
"""

from __future__ import annotations

from diagkit.remedy.guarding import Guard, MoveWarning, guard
from diagkit.remedy.healed import Healing, Step
from diagkit.remedy.healing import heal

__all__ = ["Guard", "Healing", "MoveWarning", "Step", "guard", "heal"]
