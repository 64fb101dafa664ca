"""Frameworks that own the training loop.

Each module imports its framework, which is an extra and never a dependency: `huggingface` (Trainer) and `accelerate` come with
`deadpool-run[huggingface]`, `lightning` with `deadpool-run[lightning]`.
"""
