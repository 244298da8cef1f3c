#!/usr/bin/env bash
# The oldest protobuf and grpcio that the agent supports, and none of the controller's packages:
# the generated code, the wire and the agent must work there (docs/adr/0002-old-protoc.md).
set -euo pipefail
cd "$(dirname "$0")/.."

wanted=$(cat pyproject.toml constraints.txt "$0" | sha256sum)
if [ "$(cat .venv-floor/.trimtab-setup 2>/dev/null || true)" != "$wanted" ]; then
    rm -rf .venv-floor
    .venv/bin/python -m venv .venv-floor
    # pydantic, PyYAML and diptest are for the loopback controller of the tests.
    .venv-floor/bin/pip install -q --disable-pip-version-check \
        protobuf==4.25.8 grpcio==1.62.3 tenacity==8.2.0 torch==2.13.0 numpy \
        pydantic pyyaml diptest pytest pytest-timeout lion-pytorch==0.2.5 torchdata==0.11.0
    .venv-floor/bin/pip install -q --disable-pip-version-check --no-deps -e .
    echo "$wanted" > .venv-floor/.trimtab-setup
fi
.venv-floor/bin/python -c "
import sys
sys.modules.update(pydantic=None, yaml=None, diptest=None)  # an import of one fails now
import trimtab.agent, trimtab.protos.wire"
.venv-floor/bin/python -m pytest -q tests/unit/protos tests/unit/agent -p no:cacheprovider
