"""What `vllm-nixl doctor` looks at: each module has one function that answers with `Finding`s.

    versions      Python, torch, vLLM, NIXL, this package; whether vLLM would load the plugin
    environment   our settings, and variables of others that are known to go wrong
    machine       memory that can be registered, namespaces, GPUs, network devices and how far these are from GPUs
    transports    NIXL's plug-ins, and the bandwidth of real writes between two processes (`probe` is one of them)

Nothing here imports vLLM, and nothing is changed. A finding is `BAD` when a push or a server would fail by it.
"""
