#!/usr/bin/env bash
# Makes .venv with the pinned packages.  Does nothing when neither they nor pyproject.toml changed.
set -euo pipefail
cd "$(dirname "$0")/.."

wanted=$(cat pyproject.toml constraints.txt | sha256sum)
if [ "$(cat .venv/.trimtab-setup 2>/dev/null || true)" = "$wanted" ]; then
    exit 0
fi
if [ ! -x .venv/bin/pip ]; then
    echo "setting up .venv"
    if ! python3 -m venv .venv >/dev/null 2>&1; then
        rm -rf .venv
        # Debian keeps venv in a package of its own.
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
            apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null
        else
            echo "python3 cannot make virtual environments: install python3-venv" >&2
            exit 1
        fi
        python3 -m venv .venv
    fi
fi
echo "installing the pinned packages (some minutes the first time)"
.venv/bin/pip install -q --disable-pip-version-check -c constraints.txt -e ".[demo,dev]"
echo "$wanted" > .venv/.trimtab-setup
