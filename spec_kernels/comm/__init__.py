"""Ranks of one machine: the communicator, its policy, and starting the processes."""

from spec_kernels.comm.communicator import Communicator, Group, from_environment

__all__ = ["Communicator", "Group", "from_environment"]
