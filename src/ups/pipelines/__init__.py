"""The Kedro pipelines, one module each: `create_pipeline` on top is the table of contents, its nodes follow.

`data`: raw files to checked, split and normalized datasets.
`training`: codec, latents, operator, steady model, diffusion, consistency.
`evaluation`: corrector, scores, figures, gates.
`baselines`: FNO, U-Net and linear models at equal cost, and the comparison with them.
`studies`: ablation, fine-tuning, selection by physics, seeds.
`performance`: tune, profile, benchmark.

Every node takes the two folders of a run as parameters, `data_root` and `raw_root`, which `ParameterHooks` has made
absolute. They are not datasets, because these would add edges to nearly every node of the graph.
"""
