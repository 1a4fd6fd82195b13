"""Running steps and skipping finished ones: the stage cache, training jobs under torchrun, run folders, tracking.

stage_cache: a step is done once per key (configuration, inputs, code)
launcher: train a stage, restart its job after a fault
torchrun: a job as a child process: start, heartbeats, end
compiler_caches: where a job keeps compiled code
node: torchrun on one of several nodes
processes: ends a worker when its parent process ends; the memory that a process may use
run: files of a run folder, read and written by launcher and workers
status: why a job has ended; `status.json`
machine: device, micro-batch that fits, times in turns, description of the machine
submission: a run as a job of Slurm, SkyPilot, dstack, Kubernetes or Kubeflow, whose templates are `*.jinja`
tracking: MLflow runs
registry: MLflow's registry of models
served_model: the model as MLflow serves it, a file that is copied beside the bundle
progress: progress bars
"""
