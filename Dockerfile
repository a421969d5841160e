# Each image is a virtual environment: first the packages, as hashes.txt pins them, then the project's wheel. An edit of the
# sources builds the last layer alone. Whatever is installed must have a hash in hashes.txt (`make locks`), extras included, and
# nothing but the project's wheel is built. It needs BuildKit, which docker has by default.
#   docker build --target serve      -t halfserve:serve .         serves models on the CPU, with OpenVINO; no torch and no CUDA
#   docker build --target serve-cuda -t halfserve:serve-cuda .    the same with ONNX Runtime for GPUs and the CUDA libraries
#   docker build --target export     -t halfserve:export .        trains and exports
# --build-arg EXTRAS="text trace" adds extras of pyproject.toml.
ARG PYTHON=3.12.13

FROM python:${PYTHON}-slim-trixie AS base
ENV PYTHONUNBUFFERED=1 PATH=/opt/halfserve/.venv/bin:$PATH XDG_CACHE_HOME=/tmp/cache
WORKDIR /opt/halfserve
RUN useradd --no-log-init --no-create-home --uid 10001 halfserve
COPY pyproject.toml hashes.txt ./

# What builds, installs and lists packages; mounted below, so that it is not in the images.
FROM base AS tools
RUN python -m venv /opt/tools && echo onnxruntime-gpu > /opt/tools/without-gpu.txt \
  && sed -n '/^uv==/,/[^\\]$/p' hashes.txt > /opt/tools/uv.txt \
  && /opt/tools/bin/pip install --quiet --no-cache-dir --disable-pip-version-check --require-hashes -r /opt/tools/uv.txt \
  && VIRTUAL_ENV=/opt/tools /opt/tools/bin/uv pip install --quiet --no-cache --require-hashes --constraint hashes.txt \
  "$(grep -o '^cyclonedx-bom==[^ ]*' hashes.txt)"

# The same Python, with a C compiler: the server's hot path is compiled here, and no compiler is in the images.
FROM python:${PYTHON}-trixie AS wheel
WORKDIR /src
COPY pyproject.toml hashes.txt setup.py README.md LICENSE ./
COPY halfserve halfserve
COPY protos protos
COPY serve serve
COPY amp_core amp_core
COPY export export
COPY examples examples
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
  /opt/tools/bin/uv build --quiet --no-cache --wheel --require-hashes --build-constraint hashes.txt --out-dir /wheels

FROM base AS export
ARG EXTRAS=""
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
  for extra in train export ${EXTRAS}; do set -- "$@" --extra "$extra"; done \
  && /opt/tools/bin/uv venv --quiet \
  && /opt/tools/bin/uv pip install --quiet --no-cache --compile-bytecode --no-build --require-hashes --constraint hashes.txt \
  -r pyproject.toml "$@"
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
  /opt/tools/bin/uv pip install --quiet --no-cache --compile-bytecode --no-deps /wheels/*.whl && halfserve --version \
  && /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file sbom.json .venv
USER 10001
WORKDIR /work
ENTRYPOINT ["halfserve"]
CMD ["--help"]

FROM base AS server
EXPOSE 8000 8001 8002
# Asks REST whether the server is ready, which needs no token and no Python. With TLS or without REST, give another check
# (--health-cmd).
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/${HALFSERVE_SERVE_HTTP_PORT:-8000} && printf 'GET /v2/health/ready HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n' >&3 && read -r _ status _ <&3 && [ \"$status\" = 200 ]"]
ENTRYPOINT ["halfserve"]
CMD ["serve", "/models", "--host", "0.0.0.0"]

FROM server AS serve-cuda
ARG EXTRAS=""
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
  for extra in cuda ${EXTRAS}; do set -- "$@" --extra "$extra"; done \
  && /opt/tools/bin/uv venv --quiet \
  && /opt/tools/bin/uv pip install --quiet --no-cache --compile-bytecode --no-build --require-hashes --constraint hashes.txt \
  -r pyproject.toml "$@"
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
  /opt/tools/bin/uv pip install --quiet --no-cache --compile-bytecode --no-deps /wheels/*.whl && halfserve --version \
  && /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file sbom.json .venv
USER 10001
WORKDIR /models

# The last one, which is built where no target is named. ONNX Runtime for the CPU takes the place of the one for GPUs, which would
# run here too and is 340 MB larger.
FROM server AS serve
ARG EXTRAS=""
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
  for extra in openvino ${EXTRAS}; do set -- "$@" --extra "$extra"; done \
  && /opt/tools/bin/uv venv --quiet \
  && /opt/tools/bin/uv pip install --quiet --no-cache --compile-bytecode --no-build --require-hashes --constraint hashes.txt \
  -r pyproject.toml "$@" --excludes /opt/tools/without-gpu.txt "$(grep -o '^onnxruntime==[^ ]*' hashes.txt)"
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
  /opt/tools/bin/uv pip install --quiet --no-cache --compile-bytecode --no-deps /wheels/*.whl && halfserve --version \
  && /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file sbom.json .venv
USER 10001
WORKDIR /models
