# A vLLM server with the plugin, for NVIDIA GPUs.
#
#   docker build -t vllm-nixl .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -p 8000:8000 -v "$PWD/token:/run/push/token:ro" vllm-nixl MODEL
#
# No test builds it: they check the names in it. VLLM is a tag of vLLM's own image, inside of the range of versions in
# pyproject.toml. Its vLLM and torch stay as they are: the wheel is installed without the `server` extra, and pip is told
# to change neither.
ARG VLLM=v0.32.0

FROM python:3.12-slim AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY vllm_nixl_plugin vllm_nixl_plugin
COPY trainer_client trainer_client
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM vllm/vllm-openai:${VLLM}
COPY --from=wheel /wheels /wheels
RUN python3 -m pip freeze | grep -E '^(torch|vllm)==' > /wheels/constraints.txt \
    && python3 -m pip install --no-cache-dir --constraint /wheels/constraints.txt /wheels/*.whl \
    && rm -r /wheels \
    && vllm-nixl --help > /dev/null
ENV VLLM_PLUGINS=nixl \
    PUSH_WEIGHTS_TOKEN_FILE=/run/push/token
ENTRYPOINT ["vllm", "serve", "--worker-extension-cls", "vllm_nixl_plugin.NixlWorkerExtension"]
