#!/bin/sh
# The user that the server runs as, and its home, a folder for models and caches, which becomes a volume: create-user.sh
set -eu
id=10001
groupadd --gid "$id" hybrid
useradd --home-dir /cache --no-create-home --uid "$id" --gid "$id" --shell /usr/sbin/nologin hybrid
install -d -o "$id" -g "$id" /cache /cache/models /cache/huggingface
