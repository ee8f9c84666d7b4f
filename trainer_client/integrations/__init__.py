"""Adapters to the weight-sync interfaces of trainers: `trl`, `verl`, `skyrl`, `vllm`.

Each is a module of its own that imports its framework; nothing else here imports them. docs/integrations.md says how
they are used.
"""
