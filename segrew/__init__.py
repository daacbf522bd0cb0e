"""segrew: segment-level dense reward models, and PPO that acts on segments.

Importing the package loads nothing heavy: take what you need from its modules, for example
`from segrew.segmentation import segment_by_entropy`.

Axes, in every shape of the package: b batch, t response token, s unit (segment or macro action),
n any flat or sequential axis, v vocabulary, d width.
"""

__version__ = "0.1.0"
