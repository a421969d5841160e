# Two images from one file, by the same steps as the Makefile: a virtual environment, then pip with the constraints file.
#   docker build --target serve  -t halfserve:serve .                     serves models; no torch inside
#   docker build --target serve  --build-arg EXTRAS='[cuda]' -t ... .     the same with the CUDA libraries
#   docker build --target export -t halfserve:export .                    trains and exports

# The same Python as below, with a C compiler: the server's hot path is compiled here, and no compiler is in the images.
FROM python:3.12 AS wheel
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY halfserve halfserve
COPY protos protos
COPY serve serve
COPY amp_core amp_core
COPY export export
COPY examples examples
RUN python -m pip wheel --quiet --no-cache-dir --disable-pip-version-check --no-deps --wheel-dir /wheels .

FROM python:3.12-slim AS base
ENV PYTHONUNBUFFERED=1 PATH=/opt/halfserve/.venv/bin:$PATH
WORKDIR /opt/halfserve
RUN python -m venv .venv && useradd --create-home --uid 10001 halfserve
COPY constraints.txt ./
COPY --from=wheel /wheels wheels

FROM base AS export
RUN .venv/bin/python -m pip install --quiet --no-cache-dir --disable-pip-version-check --constraint constraints.txt \
    "$(echo wheels/*.whl)[train,export]" && halfserve --version
USER 10001
WORKDIR /work
ENTRYPOINT ["halfserve"]
CMD ["--help"]

FROM base AS serve
ARG EXTRAS=""
RUN .venv/bin/python -m pip install --quiet --no-cache-dir --disable-pip-version-check --constraint constraints.txt \
    "$(echo wheels/*.whl)${EXTRAS}" && halfserve --version
USER 10001
WORKDIR /models
EXPOSE 8000 8001 8002
# Whether the server is ready is told without a token. With TLS, give a check with certificates of your own (--health-cmd).
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
  CMD ["python", "-P", "-c", "import halfserve, sys; sys.exit(not halfserve.Client('127.0.0.1:8001', timeout_s=4).is_ready())"]
ENTRYPOINT ["halfserve"]
CMD ["serve", "/models", "--host", "0.0.0.0", "--grpc-port", "8001"]
