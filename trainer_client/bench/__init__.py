"""What a push costs on this machine, each figure beside what else does the same here: ``vllm-nixl bench``.

    shapes      models of any size, random weights
    servers     real ``vllm serve`` processes   |   trainer    ranks of a trainer, each a process, and pipes to them
    ways        push | save and reload | broadcast and reload; `extension` is the servers' part of the last two
    parts       what is measured: wire, push, gap, memory, overhead, growth, window; `planning` and `growth` their own
    results     one object of JSON, a table for people; `plots` draws the growth

`trainer_client.commands.bench` calls `parts.run`. Ours and theirs are measured in turns in one run, and only medians
and their ratios are told: times of a shared machine mean little. vLLM is needed here, since servers are started.
"""
