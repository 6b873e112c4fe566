"""The launcher's flags."""

import re
from dataclasses import dataclass


@dataclass
class LaunchOptions:
    """How many processes run, and how they find each other. The names are those of torchrun.

    Attributes:
        nproc_per_node: Processes on this machine. By default one for each accelerator that this process may use, and
            one where there is none; 2 on a machine without accelerators starts two CPU processes.
        nnodes: Machines that take part, or `MIN:MAX` for an elastic run. Start the same command on each.
        node_rank: Which of them this is, from 0; the `static` rendezvous needs it.
        rdzv_backend: How machines find each other: `c10d`, or `static`, where machine 0 is the one at the endpoint.
        rdzv_endpoint: `HOST:PORT` on machine 0; needed as soon as there is more than one machine.
        max_restarts: How often the processes are started again after one of them failed.

    Raises:
        ValueError: If a number is out of range, or several machines have no endpoint to meet at.

    Example:
        >>> from posttrain_launchers import LaunchOptions
        >>> LaunchOptions(nproc_per_node=2).nodes
        (1, 1)
        >>> LaunchOptions(nnodes="2")
        Traceback (most recent call last):
            ...
        ValueError: nnodes=2 needs rdzv_endpoint: HOST:PORT of machine 0, the same on each machine
    """

    nproc_per_node: int | None = None
    nnodes: str = "1"
    node_rank: int = 0
    rdzv_backend: str = "c10d"
    rdzv_endpoint: str | None = None
    max_restarts: int = 0

    def __post_init__(self) -> None:
        self.nnodes = str(self.nnodes)
        if self.nproc_per_node is not None and self.nproc_per_node < 1:
            raise ValueError(
                f"nproc_per_node={self.nproc_per_node}: write 1 or more, or leave it out for all accelerators"
            )
        if not re.fullmatch(r"[0-9]+(:[0-9]+)?", self.nnodes) or not 1 <= self.nodes[0] <= self.nodes[1]:
            raise ValueError(f"nnodes={self.nnodes}: write a number of machines, or MIN:MAX")
        if not 0 <= self.node_rank < self.nodes[1]:
            raise ValueError(f"node_rank={self.node_rank}: with nnodes={self.nnodes} write 0 to {self.nodes[1] - 1}")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts={self.max_restarts}: write 0 or more")
        if self.nodes[1] > 1 and not self.rdzv_endpoint:
            raise ValueError(
                f"nnodes={self.nnodes} needs rdzv_endpoint: HOST:PORT of machine 0, the same on each machine"
            )

    @property
    def nodes(self) -> tuple[int, int]:
        """The fewest and the most machines."""
        least, _, most = self.nnodes.partition(":")
        return int(least), int(most or least)
