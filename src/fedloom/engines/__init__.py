"""Implementations of `ask`: whatever carries a task to devices and brings their replies back through admission."""

from .admission import Refusal, refuse
from .convoy import convoy
from .holdings import Shelf, devices_at_once, shelf
from .in_process import InProcess
from .memory import Memory
from .process_pool import Crew, Member, ProcessPool, keep_the_heap
from .rehearsal import Rehearsal

__all__ = [
    "Crew",
    "InProcess",
    "Member",
    "Memory",
    "ProcessPool",
    "Refusal",
    "Rehearsal",
    "Shelf",
    "convoy",
    "devices_at_once",
    "keep_the_heap",
    "refuse",
    "shelf",
]
