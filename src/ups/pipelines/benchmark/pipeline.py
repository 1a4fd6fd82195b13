"""stub"""
from kedro.pipeline import Pipeline
def create_pipeline() -> Pipeline:
    return Pipeline([])
