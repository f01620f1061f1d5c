"""Implementations of `ask`: whatever carries a task to devices and brings their replies back through admission."""

from .attacks import ATTACKS, Attacked, malicious, poisoned
from .client_data import Shelf, devices_at_once, shelf
from .client_state import Memory
from .compression import Codec, Coded
from .dry_run import Rehearsal
from .gate import Refusal, refuse
from .in_process import InProcess
from .lockstep import convoy
from .norm_screening import Norms
from .protocol import ByMail, Heading, Question, opened, sealed
from .worker_pool import Crew, Member, ProcessPool, keep_the_heap

__all__ = [
    "ATTACKS",
    "Attacked",
    "ByMail",
    "Codec",
    "Coded",
    "Crew",
    "Heading",
    "InProcess",
    "Member",
    "Memory",
    "Norms",
    "ProcessPool",
    "Question",
    "Refusal",
    "Rehearsal",
    "Shelf",
    "convoy",
    "devices_at_once",
    "keep_the_heap",
    "malicious",
    "opened",
    "poisoned",
    "refuse",
    "sealed",
    "shelf",
]
