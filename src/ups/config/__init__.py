"""Every parameter, typed and closed: an unknown key, a wrong type or an impossible value stops before any work."""

from ups.config.ablation import BASE, AblationConfig, Variant
from ups.config.baselines import BaselineConfig, BaselinesConfig
from ups.config.data import DownloadConfig, LatentsConfig, SimulateConfig, SplitConfig
from ups.config.evaluation import (
    CorrectorConfig,
    EvaluationConfig,
    Gate,
    JudgeConfig,
    SeedsConfig,
    SelectionConfig,
    StudentConfig,
)
from ups.config.launch import LaunchConfig
from ups.config.loss import Noise, Terms, Unroll
from ups.config.models import Backbone, CodecModel
from ups.config.parameters import Parameters
from ups.config.speed import BenchmarkConfig, ProfileConfig
from ups.config.training import (
    CodecConfig,
    ConsistencyConfig,
    DiffusionConfig,
    FinetuneConfig,
    OperatorConfig,
    SteadyConfig,
    TrainingSection,
)

__all__ = [
    "BASE",
    "AblationConfig",
    "Backbone",
    "BaselineConfig",
    "BaselinesConfig",
    "BenchmarkConfig",
    "CodecConfig",
    "CodecModel",
    "ConsistencyConfig",
    "CorrectorConfig",
    "DiffusionConfig",
    "DownloadConfig",
    "EvaluationConfig",
    "FinetuneConfig",
    "Gate",
    "JudgeConfig",
    "LatentsConfig",
    "LaunchConfig",
    "Noise",
    "OperatorConfig",
    "Parameters",
    "ProfileConfig",
    "SeedsConfig",
    "SelectionConfig",
    "SimulateConfig",
    "SplitConfig",
    "SteadyConfig",
    "StudentConfig",
    "Terms",
    "TrainingSection",
    "Unroll",
    "Variant",
]
