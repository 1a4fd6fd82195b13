"""Kedro's settings: parameters of an environment are merged into the base, section by section."""

import os
import warnings

from kedro import KedroDeprecationWarning
from omegaconf.resolvers import oc

from ups.config import FROM_ENVIRONMENT
from ups.hooks import MemoryHooks, ParameterHooks, TrackingHooks
from ups.session import ConfigLoader, Session

warnings.filterwarnings("ignore", "Option '--pipeline'", KedroDeprecationWarning)  # README uses `--pipeline`

# Idle OpenMP threads sleep: spinning ones make a step several times slower when another process needs a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def read_environment(name: str, *default: str | None) -> str | None:
    """The resolver `${oc.env:NAME,default}` of OmegaConf, which notes what it takes from the environment."""
    if name in os.environ:
        FROM_ENVIRONMENT.add(os.environ[name])
    return oc.env(name, *default)


# Kedro calls the last first: parameters are checked before any use.
HOOKS = (MemoryHooks(), TrackingHooks(), ParameterHooks())
# The hooks of these plug-ins write beside the project and post usage data; a run must write below data_root alone.
DISABLE_HOOKS_FOR_PLUGINS = ("kedro-viz", "kedro-telemetry")
SESSION_CLASS = Session
CONFIG_LOADER_CLASS = ConfigLoader
CONFIG_LOADER_ARGS = {
    "base_env": "base",
    "default_run_env": "local",
    "config_patterns": {"families": ["families*", "families*/**", "**/families*"]},
    "merge_strategy": {"parameters": "soft"},
    "custom_resolvers": {"oc.env": read_environment},
}
