"""Dataclasses that the examples of this package parse into."""

from dataclasses import dataclass, field


@dataclass
class DemoConfig:
    """A small config.

    Attributes:
        learning_rate: Step size of the optimiser.
        layers: Names of the layers to train.
        shuffle: Visit the rows in random order.
    """

    learning_rate: float = 1e-4
    layers: list[str] = field(default_factory=list)
    shuffle: bool = True
