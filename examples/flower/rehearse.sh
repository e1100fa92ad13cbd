#!/usr/bin/env bash
# Plays docs/two_organisations.md on one machine, from keys to a model, and compares the model with `mpu aggregate` by hand:
#   rehearse.sh MODEL FORGET RETAIN [DIR]      with mpu, flwr and their programs on PATH; DIR (default: rehearsal) must not exist
# As root, USERS="link courier records" runs each party's programs as these users, who exist, as the page asks for; the
# last two are in one group, which GROUP names.
set -euo pipefail
model=$(realpath "$1") forget=$(realpath "$2") retain=$(realpath "$3") dir=$(realpath -m "${4:-rehearsal}")
here=$(dirname "$(realpath "$0")")
read -r link courier records <<< "${USERS:-}" || true
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
mkdir -m 711 "$dir"
cd "$dir"
started=()
stop() { for pid in "${started[@]}"; do kill -- "-$pid" 2> /dev/null || true; done; }
trap stop EXIT

as() { # as USER COMMAND…: as that user, if there are users, with a home of its own
  local user=$1 home="$dir/home-${1:-me}"
  shift
  [ -d "$home" ] || install -d -m 700 ${user:+-o "$user"} "$home"
  if [ -n "$user" ]; then
    HOME=$home XDG_CONFIG_HOME=$home/.config FLWR_HOME=$home/.flwr setpriv --reuid "$user" --regid "${GROUP:-$user}" --init-groups "$@"
  else
    HOME=$home XDG_CONFIG_HOME=$home/.config FLWR_HOME=$home/.flwr "$@"
  fi
}
begin() { # begin NAME USER COMMAND…: in the background, with a log
  local name=$1
  shift
  set -m
  as "$@" > "$dir/$name.log" 2>&1 &
  set +m
  started+=($!)
}
port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

echo "== keys and certificates"
address=127.0.0.1:$(port)
install -d -m 700 ${link:+-o "$link"} server
as "$link" bash "$here/certificates.sh" "$dir/server/tls" localhost
install -m 644 server/tls/ca.pem ca.pem
install -d -m 700 ${courier:+-o "$courier"} courier
as "$courier" ssh-keygen -q -t ecdsa -b 384 -N "" -f "$dir/courier/hospital"
install -m 644 courier/hospital.pub hospital.pub

echo "== the model's owner: SuperLink"
tls=$dir/server/tls
(umask 077 && begin link "$link" flower-superlink --host 127.0.0.1 --port "${address#*:}" --database "$dir/server/state.db" \
  --ssl-certfile "$tls/server.pem" --ssl-keyfile "$tls/server.key" --ssl-ca-certfile "$tls/ca.pem" --enable-supernode-auth \
  --isolation process --superexec-auth-secret-file "$tls/superexec.secret" --disable-runtime-dependency-installation)
for _ in $(seq 120); do (: > "/dev/tcp/127.0.0.1/${address#*:}") 2> /dev/null && break; sleep 0.5; done
begin superexec "$link" flower-superexec --runtime-api-address "$address" --root-certificates "$tls/ca.pem" \
  --superexec-auth-secret-file "$tls/superexec.secret"
flwr_home=$dir/home-${link:-me}/.flwr
as "$link" mkdir -p "$flwr_home"
printf '[superlink]\ndefault = "here"\n[superlink.here]\naddress = "%s"\nroot-certificates = "%s"\n' "$address" "$tls/ca.pem" | install -m 644 /dev/stdin config.toml
as "$link" cp "$dir/config.toml" "$flwr_home/config.toml"
as "$link" flwr supernode register "$dir/hospital.pub" here --name hospital > register.log

echo "== the data owner: spool, SuperNode, watch"
install -d -m 711 ${records:+-o "$records"} data
install -d -m 700 ${records:+-o "$records"} data/private
spool=$dir/data/spool private=$dir/data/private
[ -n "$records" ] || install -d -m 700 "$spool" # else watch makes it, for the group
install -m 600 ${records:+-o "$records"} "$forget" "$private/forget.jsonl"
install -m 600 ${records:+-o "$records"} "$retain" "$private/retain.jsonl"
begin watch "$records" mpu watch "$spool" ${records:+--spool-group "${GROUP:?}"} --forget "$private/forget.jsonl" --retain "$private/retain.jsonl" \
  --work "$private/work" --algo npo --lr 1e-4 --epochs 2 --poll 1 --device cpu
until [ -d "$spool" ]; do kill -0 "${started[-1]}"; sleep 0.2; done
begin node "$courier" flower-supernode --superlink "$address" --root-certificates "$dir/ca.pem" \
  --auth-supernode-private-key "$dir/courier/hospital" --node-config "spool=\"$spool\"" --port "$(port)"

echo "== the model's owner: a round"
config="base=\"$model\" state=\"$dir/server/rounds\" owners=\"hospital\" rounds=1 poll=2.0 publish=\"--copies 2 --kappa 0.01\""
run=$(as "$link" flwr run "$here" here --format json --run-config "$config" | python3 -c 'import json, sys; print(json.load(sys.stdin)["run-id"])')
for _ in $(seq 600); do
  status=$(as "$link" flwr ls here --run-id "$run" --format json | python3 -c 'import json, sys; print(json.load(sys.stdin)["runs"][0]["status"])')
  case $status in finished:*) break ;; esac
  sleep 1
done
as "$link" flwr log "$run" here > run.log 2>&1 || true
[ "$status" = finished:completed ] || { tail -20 run.log superexec.log watch.log node.log >&2; exit 1; }

echo "== by hand"
round=$dir/server/rounds/round_1
as "$link" mpu aggregate "$round/hospital/deltas" --keys "$round/hospital/keys.bin" --identity "$dir/server/rounds/identity.txt" \
  --base "$model" --out "$dir/server/by-hand" > /dev/null
as "$link" cmp "$round/model/model.safetensors" "$dir/server/by-hand/model.safetensors"
if [ -n "$records" ]; then
  ! as "$courier" cat "$private/forget.jsonl" 2> /dev/null || { echo "the courier can read the records" >&2; exit 1; }
fi
echo "the model of the round is that of mpu aggregate, byte for byte: $round/model"
