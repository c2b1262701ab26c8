#!/bin/sh
# Install Debian packages and leave no package lists behind: system-packages.sh PACKAGE...
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends "$@"
apt-get clean
rm -rf /var/lib/apt/lists/*
