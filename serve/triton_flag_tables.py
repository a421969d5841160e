"""The flags of tritonserver: the options of `halfserve serve` that they become, or why they are refused or ignored."""

from __future__ import annotations

MIB = 2**20
ANY_ADDRESS = "0.0.0.0"  # noqa: S104  (tritonserver's default)
OWN_TRUST = ["--shared-memory", "--trust-python-models"]  # tritonserver 2.51 allows both by default
SECRETS = {"--grpc-restricted-protocol", "--http-restricted-api"}
# Options of `halfserve serve` that take a flag's value unchanged, by flag.
SAME = {
    "grpc-port": "--grpc-port",
    "model-control-mode": "--model-control",
    "repository-poll-secs": "--poll-seconds",
    "load-model": "--load-model",
    "log-verbose": "--log-verbose",
    "exit-timeout-secs": "--drain-seconds",
    "model-load-thread-count": "--load-threads",
    "grpc-header-forward-pattern": "--grpc-header-forward-pattern",
    "http-header-forward-pattern": "--http-header-forward-pattern",
    "grpc-restricted-protocol": "--grpc-restricted-protocol",
    "http-restricted-api": "--http-restricted-api",
    "metrics-config": "--metrics-config",
    "http-max-input-size": "--http-max-input-size",
    "model-config-name": "--model-config-name",
    "transport": "--transport",  # no flag of tritonserver
}
FILES = {"grpc-server-cert": "--tls-cert", "grpc-server-key": "--tls-key", "grpc-root-cert": "--tls-client-ca"}
ADDRESSES = ("http-address", "grpc-address", "metrics-address")
REPOSITORIES = ("model-repository", "model-store")
# Flags with a value of true or false, and the value that changes nothing here; None if both values are ignored.
SWITCHES: dict[str, bool | None] = {
    "allow-grpc": True,
    "allow-http": True,
    "allow-metrics": True,
    "exit-on-error": True,
    "grpc-use-ssl": False,
    "grpc-use-ssl-mutual": False,
    "allow-client-shm": True,
    "allow-sagemaker": False,
    "allow-vertex-ai": False,
    "disable-auto-complete-config": False,
    "strict-model-config": False,
    "model-namespacing": False,
    "strict-readiness": True,
    "enable-peer-access": None,
    "reuse-http-port": False,
    "reuse-grpc-port": False,
    "log-info": True,
    "log-warning": True,
    "log-error": True,
    "allow-gpu-metrics": True,
    "allow-cpu-metrics": True,
}
# Options of `halfserve serve` for switches, by the value that asks for them.
SWITCH_OPTIONS = {
    "allow-grpc": (False, "--no-grpc"),
    "exit-on-error": (False, "--keep-going"),
    "disable-auto-complete-config": (True, "--require-config"),
    "strict-model-config": (True, "--require-config"),
    "reuse-grpc-port": (True, "--reuse-ports"),
    "reuse-http-port": (True, "--reuse-ports"),
}
TRANSLATED_SWITCHES = {
    *("allow-grpc", "allow-http", "allow-metrics", "allow-client-shm", "exit-on-error", "grpc-use-ssl", "grpc-use-ssl-mutual"),
    *("disable-auto-complete-config", "strict-model-config", "strict-readiness", "model-namespacing"),
    *("reuse-grpc-port", "reuse-http-port"),
}
# Switches that are refused when they are on: a script that sets them expects what is not here.
REFUSED_SWITCHES = {
    "allow-sagemaker": "there is no port for SageMaker; send requests to the REST port, or leave the flag out",
    "allow-vertex-ai": "there is no port for Vertex AI; send requests to the REST port, or leave the flag out",
}
REFUSED = {
    "model-load-gpu-limit": "the device's memory is the limit; leave the flag out",
    "rate-limit-resource": "models do not wait for resources; leave --rate-limit and it out",
}
# Ignored flags, with advice on what to do instead.
IGNORED = {
    "log-format": "see --log-format of halfserve serve",
    "metrics-interval-ms": "figures are read at each scrape",
    "cache-directory": "the cache is built in",
    "backend-directory": "backends are built in",
    "repoagent-directory": "there are no repository agents",
    "http-thread-count": "one event loop serves all connections; see --processes",
    "model-load-retry-count": "a model that cannot be loaded is refused",
    "grpc-keepalive-time": "connections are checked for progress",
    "grpc-keepalive-timeout": "connections are checked for progress",
    "grpc-keepalive-permit-without-calls": "pings are answered at any time",
    "grpc-http2-max-pings-without-data": "pings are answered at any time",
    "grpc-http2-min-recv-ping-interval-without-data": "pings are answered at any time",
    "grpc-http2-max-ping-strikes": "pings are answered at any time",
    "grpc-max-connection-age": "connections stay open",
    "grpc-max-connection-age-grace": "connections stay open",
    "grpc-infer-thread-count": "one event loop serves all connections; see --processes",
    "grpc-infer-allocation-pool-size": "requests need no pool",
    "grpc-max-response-pool-size": "responses that a client does not read wait in bounded memory",
    "grpc-infer-response-compression-level": "answers over gRPC are not compressed",
    "pinned-memory-pool-byte-size": "there is no pool",
    "cuda-memory-pool-byte-size": "there is no pool",
    "cuda-virtual-address-size": "there is no pool",
    "buffer-manager-thread-count": "there is no pool",
    "host-policy": "use taskset or numactl",
    "min-supported-compute-capability": "what a CUDA device computes is tried out when a model is loaded",
    "sagemaker-port": "there is no SageMaker port",
    "sagemaker-safe-port-range": "there is no SageMaker port",
    "sagemaker-thread-count": "there is no SageMaker port",
    "vertex-ai-port": "there is no Vertex AI port",
    "vertex-ai-thread-count": "there is no Vertex AI port",
    "vertex-ai-default-model": "there is no Vertex AI port",
}
# Older flags, by the settings of --trace-config that replace them.
TRACE_FLAGS = {
    "trace-file": "triton,file",
    "trace-log-frequency": "triton,log-frequency",
    "trace-level": "level",
    "trace-rate": "rate",
    "trace-count": "count",
}
TRACE_OPTIONS = {"rate": "--trace-rate", "count": "--trace-count", "triton,log-frequency": "--trace-log-frequency"}
LEVELS_ON = {"timestamps", "true", "on", "min", "max"}
LEVELS_OFF = {"off", "false"}
# Variables of OpenTelemetry, by the settings of --trace-config that they stand for.
OPENTELEMETRY = {
    "opentelemetry,url": "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "opentelemetry,resource": "OTEL_RESOURCE_ATTRIBUTES",
    "opentelemetry,bsp_max_queue_size": "OTEL_BSP_MAX_QUEUE_SIZE",
    "opentelemetry,bsp_schedule_delay": "OTEL_BSP_SCHEDULE_DELAY",
    "opentelemetry,bsp_max_export_batch_size": "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
}
OTHERS = {
    *("http-port", "metrics-port", "cache-config", "response-cache-byte-size", "backend-config", "trace-config", *TRACE_FLAGS),
    *("id", "log-file", "rate-limit", "help", "version"),
}
FLAGS = {*SAME, *FILES, *ADDRESSES, *REPOSITORIES, *SWITCHES, *IGNORED, *REFUSED, *OTHERS}
NO_VALUE = {"disable-auto-complete-config", "help", "version"}
BOOLS = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
