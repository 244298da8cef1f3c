#!/usr/bin/env bash
# Runs gen_protos.py in an environment with the old protoc that generated code is made with.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! .venv-protos/bin/python -c "import grpc_tools" 2>/dev/null; then
    rm -rf .venv-protos
    .venv/bin/python -m venv .venv-protos
    .venv-protos/bin/pip install -q --disable-pip-version-check grpcio-tools==1.62.3 "setuptools<81"
fi
.venv-protos/bin/python tools/gen_protos.py "$@"
