#!/usr/bin/env bash
# Runs gen_protos.py in an environment with the old protoc that generated code is made with.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ ! -x .venv-protos/bin/python ]; then
    .venv/bin/python -m venv .venv-protos
    .venv-protos/bin/pip install -q --disable-pip-version-check grpcio-tools==1.62.3 "setuptools<81"
fi
.venv-protos/bin/python tools/gen_protos.py "$@"
