"""Whether prompts leave their answers room in a model's context."""

from collections.abc import Iterable
from operator import itemgetter

from torch import nn

from segrew.language_models import context_length


def check_room(model: nn.Module, needed: Iterable[tuple[str, int]], *, name: str, remedy: str) -> int:
    """Return the most tokens that anything needs.

    Args:
        needed: where each prompt is from, and the tokens of it and its longest answer together.
        name: of the model, in words. remedy: what to do about it.

    Raises:
        ValueError: that is more than the model has positions for; past them its numbers mean nothing.
    """
    (where, most), limit = max(needed, key=itemgetter(1)), context_length(model)
    if limit is not None and most > limit:
        raise ValueError(f"{where}: needs up to {most} tokens with its answers, {name}'s context has {limit}; {remedy}")
    return most
