"""Suites of the front ends: generate, parameters and headers, optional inputs, restricted APIs."""

from __future__ import annotations

from benchmarks.triton_qa.repository import folder
from benchmarks.triton_qa.suite import Suite

HEADERS = "my_header.*"
FRONTENDS = (
    Suite(name="generate", tests="L0_http/generate_endpoint_test.py", models=(folder("L0_http/generate_models"),)),
    *(
        Suite(
            name=f"parameters_{number}",
            tests="L0_parameters/parameters_test.py",
            models=(folder("L0_parameters/model_repository"),),
            flags=("--exit-timeout-secs=120", *flags),
            environment={"TEST_HEADER": header},
        )
        for number, (header, flags) in enumerate(
            {
                "test_params": (),
                "test_headers": ("--grpc-header-forward-pattern", HEADERS, "--http-header-forward-pattern", HEADERS),
                "test_header_forward_pattern_case_insensitive": (
                    "--grpc-header-forward-pattern",
                    HEADERS.upper(),
                    "--http-header-forward-pattern",
                    HEADERS.upper(),
                ),
                "test_grpc_header_forward_pattern_case_sensitive": ("--grpc-header-forward-pattern", "(?-i)MY_HEADER.*"),
            }.items()
        )
    ),
    Suite(
        name="optional_input",
        tests="L0_optional_input/optional_input_test.py",
        models=(folder("L0_optional_input/models"),),
        has_fresh_servers=True,
    ),
)
