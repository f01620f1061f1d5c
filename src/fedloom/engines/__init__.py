"""Implementations of `ask`: whatever carries a task to devices and brings their replies back through admission."""

from .attacks import ATTACKS, Attacked, malicious, poisoned
from .client_data import ClientData, build_client_data, devices_at_once
from .client_state import ClientStateStore
from .compression import Codec, Coded
from .dry_run import DryRun
from .gate import Refusal, refuse
from .in_process import InProcess
from .lockstep import lockstep
from .norm_screening import Norms
from .protocol import ByMail, Header, Question, encode_reply, opened
from .worker_pool import PoolClient, ProcessPool, WorkerPool, keep_the_heap

__all__ = [
    "ATTACKS",
    "Attacked",
    "ByMail",
    "ClientData",
    "ClientStateStore",
    "Codec",
    "Coded",
    "DryRun",
    "Header",
    "InProcess",
    "Norms",
    "PoolClient",
    "ProcessPool",
    "Question",
    "Refusal",
    "WorkerPool",
    "build_client_data",
    "devices_at_once",
    "encode_reply",
    "keep_the_heap",
    "lockstep",
    "malicious",
    "opened",
    "poisoned",
    "refuse",
]
