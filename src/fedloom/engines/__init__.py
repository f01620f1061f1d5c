"""Engines: implementations of `ask`, the gate that every reply passes, and the transports between."""

from .attacks import ATTACKS, Attack, AttackTransport, malicious, poisoned
from .client_data import ClientData, build_client_data, devices_at_once
from .client_state import ClientStates, ClientStateStore
from .compression import Compression, DeviceEnd, ServerEnd
from .dry_run import DryRun
from .faults import FaultInjector, FaultPlan
from .gate import Gate, Refusal, refuse
from .in_process import ENGINES, Executor, InlineExecutor, InProcess, WorkerContext
from .lockstep import Lockstep
from .norm_screening import NormScreening
from .protocol import BytesTransport, Expected, Header, decode_reply, encode_reply
from .task_ref import TaskRegistry
from .worker_pool import WorkerPool, keep_freed_memory

register = ENGINES.register

__all__ = [
    "ATTACKS", "ENGINES", "Attack", "AttackTransport", "BytesTransport", "ClientData", "ClientStateStore",
    "ClientStates", "Compression", "DeviceEnd", "DryRun", "Executor", "Expected", "FaultInjector", "FaultPlan",
    "Gate", "Header", "InProcess", "InlineExecutor", "Lockstep", "NormScreening", "Refusal", "ServerEnd",
    "TaskRegistry", "WorkerContext", "WorkerPool", "build_client_data", "decode_reply", "devices_at_once",
    "encode_reply", "keep_freed_memory", "malicious", "poisoned", "refuse", "register",
]  # fmt: skip
