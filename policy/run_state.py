"""What a run carries from step to step besides weights, optimizer and schedule."""

from dataclasses import dataclass


@dataclass
class RunState:
    """Saved in every checkpoint.

    Args:
        kl_coef: β, where it adapts.
        low_kl_steps: steps in a row whose mean KL was too far below 0.
        bad_rows: answers left out for want of a finite reward; skipped_updates: for that of a finite gradient.
    """

    kl_coef: float
    low_kl_steps: int = 0
    bad_rows: int = 0
    skipped_updates: int = 0
