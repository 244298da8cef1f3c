#!/usr/bin/env bash
# Puts a Prometheus server on the PATH for the tests, where that is allowed; else says what is missed.
set -u
command -v prometheus >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing prometheus for the tests"
    # Debian starts services on installation; the tests start their own on a free port.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then  # container images bring their own
        trap 'rm -f "$policy"' EXIT
        printf '#!/bin/sh\nexit 101\n' > "$policy" && chmod +x "$policy"
    fi
    apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus >/dev/null
fi
command -v prometheus >/dev/null ||
    echo "no prometheus server here (apt-get install prometheus): its tests will be skipped"
exit 0
