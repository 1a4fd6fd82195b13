"""The Kedro pipelines: `pipeline.py` is the table of contents, `nodes.py` its paragraphs."""
