#!/bin/sh
# The user that the server runs as, and the folder of fetched models, which becomes a volume: create-user.sh [ROOT]
# ROOT: create them below this folder instead of /.
set -eu
root=${1:-}
id=10001
groupadd ${root:+--prefix "$root"} --gid "$id" hybrid
useradd ${root:+--prefix "$root"} --create-home --uid "$id" --gid "$id" --shell /usr/sbin/nologin hybrid
install -d -o "$id" -g "$id" "$root/cache" "$root/cache/models" "$root/cache/huggingface"
