#!/usr/bin/env bash
# The protocol between two machines: bash examples/two_machines.sh [DIR]
#
# Run it on the server's machine. With CLIENT=user@host the client's part runs there, through ssh, in CLIENT_DIR, and
# copies and deltas travel by scp; without, the client is a folder beside the server's. Copies go one way, deltas the
# other, and nothing else travels. In earnest each side types its own half. MODEL, PUBLIC (the model that it came from),
# FORGET and RETAIN (absolute paths; all or none, or with CLIENT only the models) name what each owns; with CLIENT, put
# forget.jsonl and retain.jsonl into CLIENT_DIR first. Without them, models and records are those of `mpu demo`.
set -euo pipefail
work=${1:-two_machines}
mkdir -p "$work/server" "$work/client"
cd "$work"
client_dir=${CLIENT_DIR:-mpu-client}

to_client() { # what the server sends
  if [ -n "${CLIENT:-}" ]; then scp -qr "$@" "$CLIENT:$client_dir/"; else cp -r "$@" client/; fi
}
from_client() { # what the client returns
  if [ -n "${CLIENT:-}" ]; then scp -qr "$CLIENT:$client_dir/deltas" server/; else cp -r client/deltas server/; fi
}
on_client() { # a command line on the client's machine
  if [ -n "${CLIENT:-}" ]; then ssh "$CLIENT" "mkdir -p $client_dir && cd $client_dir && $1"; else (cd client && eval "$1"); fi
}

if [ -z "${MODEL:-}" ]; then
  [ -d mpu-demo ] || mpu demo
  MODEL=$PWD/mpu-demo/models/target PUBLIC=$PWD/mpu-demo/models/public
fi
if [ -z "${CLIENT:-}" ]; then # on a machine of its own the client has its records already
  cp "${FORGET:-mpu-demo/records/forget.jsonl}" client/forget.jsonl
  cp "${RETAIN:-mpu-demo/records/retain.jsonl}" client/retain.jsonl
fi

echo "== server: publish a copy, keep the keys" >&2
(cd server && mpu publish "$MODEL" --public "$PUBLIC")
on_client "mkdir -p ."
to_client server/copy_1

echo "== client: unlearn on it, until the records are forgotten" >&2
on_client "mpu unlearn copy_1"
from_client

echo "== server: undo the disguise, apply" >&2
(cd server && mpu aggregate deltas/ --keys keys.bin)
echo "$work/server/unlearned"
