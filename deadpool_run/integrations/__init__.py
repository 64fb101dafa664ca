"""Frameworks that own the training loop: each module imports its framework, which is an extra, never a dependency.

    deadpool_run.integrations.huggingface    Trainer            pip install 'deadpool-run[huggingface]'
    deadpool_run.integrations.accelerate     Accelerator        pip install 'deadpool-run[huggingface]'
    deadpool_run.integrations.lightning      Trainer, strategy  pip install 'deadpool-run[lightning]'
"""
