"""Implementations of `ask`: whatever carries a task to devices and brings their replies back through admission."""

from .admission import Refusal, refuse
from .attacks import ATTACKS, Attacked, malicious, poisoned
from .by_mail import ByMail
from .codecs import Codec
from .coded import Coded
from .convoy import convoy
from .holdings import Shelf, devices_at_once, shelf
from .in_process import InProcess
from .mail import Heading, Question, opened, sealed
from .memory import Memory
from .norms import Norms
from .process_pool import Crew, Member, ProcessPool, keep_the_heap
from .rehearsal import Rehearsal

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
