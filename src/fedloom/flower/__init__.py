"""The engine on Flower: the only folder that imports flwr, so that everything else runs without it.

Flower delivers messages between the server and devices that may come and go. It never aggregates anything.
"""

import os

ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a warning about the coming default
}
"""Switches off telemetry, update checks and installation at run time, here and in child processes."""

os.environ.update(ENVIRONMENT)  # Flower reads it once, when it is imported
