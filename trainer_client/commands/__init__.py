"""The commands of `vllm-nixl`, one module for each or for a small family; `trainer_client.cli` puts them together.

A command is a function with typer's options in its signature: a call or two of the library, then output. What they
share is in `options` (arguments, token) and `asking` (one question to every server).
"""
