"""From one command line to one process an accelerator."""

from posttrain_launchers.launch import launch, launch_options, run_command, world_size
from posttrain_launchers.options import LaunchOptions

__all__ = ["LaunchOptions", "launch", "launch_options", "run_command", "world_size"]
