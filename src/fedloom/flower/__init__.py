"""Parcels over Flower: the only room that knows it, and only who enters needs it installed.

Flower carries messages between the server and devices that may come and go. It never averages, and what is decided
here or in process is decided by the same code.
"""

import os

SILENCE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or Ray warns that it will be so
}
"""Nothing is reported, looked up or installed by whatever is started from here."""

os.environ.update(SILENCE)  # before anything of Flower is imported: it looks only then
