"""Integrations of frameworks that own the training loop. Scripts import them.

Each module imports its framework, which is an optional dependency: `huggingface` (Trainer) and `accelerate` need
`deadpool-run[huggingface]`, `lightning` needs `deadpool-run[lightning]`.
"""
